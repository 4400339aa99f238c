"""One job at a time holds a folder: live, dead, silent and stopped holders, on this host and on another one."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mpitrain.job.record.files import folder_lock
from mpitrain.job.record.files.folder_lock import FolderLock, LockedError, holder_of

ROOT = Path(__file__).resolve().parents[3]

TAKE = """
import sys, time
from pathlib import Path
from mpitrain.job.record.files.folder_lock import FolderLock, LockedError
folder = Path(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
try:
    lock = FolderLock(folder)
except LockedError as error:
    print("refused by", error)
else:
    print("held", flush=True)
    sys.stdin.readline()
    print("lost" if lock.lost() else "still held")
    if "leave" not in sys.argv:
        lock.release()
"""


def start(folder: Path, *args: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", TAKE, str(folder), *args],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "BEAT_S", 0.05)
    monkeypatch.setattr(folder_lock, "STALE_S", 0.6)


def elsewhere(folder: Path, *, pid: int = 12, job: str | None = "4711") -> Path:
    """The lock of a job on another host."""
    path = folder / ".lock"
    record = {"host": "node7", "pid": pid, "start": "1", "token": "theirs", "place": "another boot", "job": job}
    path.write_text(json.dumps(record))
    return path


def test_it_says_who_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PBS_JOBID", "12.server")
    lock = FolderLock(tmp_path)
    holder = holder_of(tmp_path / ".lock")
    assert holder is not None and (holder.pid, holder.job) == (os.getpid(), "12.server")
    with pytest.raises(LockedError, match=rf"process {os.getpid()} on .* \(job 12.server\)"):
        FolderLock(tmp_path)
    lock.release()
    assert list(tmp_path.iterdir()) == []
    FolderLock(tmp_path).release()


@pytest.mark.rest
def test_of_many_that_find_a_dead_job_s_lock_one_gets_it(tmp_path: Path) -> None:
    dead = start(tmp_path, "leave")
    dead.communicate("\n\n", timeout=30)
    assert holder_of(tmp_path / ".lock") is not None
    jobs = [start(tmp_path) for _ in range(5)]
    for job in jobs:
        assert job.stdin is not None
        job.stdin.write("\n")
        job.stdin.flush()
    first = [job.stdout.readline() for job in jobs if job.stdout is not None]
    outputs = [job.communicate("\n", timeout=30)[0] for job in jobs]
    assert first.count("held\n") == 1, first
    # Perhaps by one that had written its name a moment before the last one did.
    names = {f"process {job.pid} on" for job in jobs}
    assert all(" ".join(line.split()[2:5]) in names for line in first if line != "held\n"), first
    assert sorted(outputs) == ["", "", "", "", "still held\n"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.rest
@pytest.mark.usefixtures("quick")
def test_the_lock_of_another_host_counts_while_it_beats(tmp_path: Path) -> None:
    path = elsewhere(tmp_path)
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.05):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    said: list[str] = []
    try:
        with pytest.raises(LockedError, match=r"^process 12 on node7 \(job 4711\)$"):
            FolderLock(tmp_path, said.append)
    finally:
        over.set()
        thread.join()
    assert len(said) == 1 and "is of process 12 on node7 (job 4711): waiting up to" in said[0]
    began = time.monotonic()
    lock = FolderLock(tmp_path)
    assert time.monotonic() - began > 0.6, "it did not wait for a sign of life"
    lock.release()


@pytest.mark.rest
def test_an_old_lock_and_one_of_an_earlier_format_are_taken_at_once(tmp_path: Path) -> None:
    for text in (None, "process 12 on node7\n", ""):
        path = elsewhere(tmp_path)
        if text is not None:
            path.write_text(text)
        os.utime(path, (1, 1))
        began = time.monotonic()
        FolderLock(tmp_path).release()
        assert time.monotonic() - began < 5


@pytest.mark.usefixtures("quick")
def test_a_job_that_was_silent_for_long_learns_that_its_lock_is_gone(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    (tmp_path / "other").mkdir()
    os.replace(elsewhere(tmp_path / "other"), tmp_path / ".lock")
    until = time.monotonic() + 10
    while not (how := lock.lost()) and time.monotonic() < until:
        time.sleep(0.01)
    assert "process 12 on node7 (job 4711) took over, since this job gave no sign of life for" in how
    lock.release()
    assert holder_of(tmp_path / ".lock") is not None, "the other job's lock was removed"


def test_a_stopped_job_looks_before_it_goes_on(tmp_path: Path) -> None:
    """Its heartbeat comes too late, as after SIGSTOP: what it asks for before it writes must not rely on the thread."""
    lock = FolderLock(tmp_path)
    lock._beaten -= folder_lock.STALE_S
    elsewhere(tmp_path)
    assert lock.lost()
    lock.release()


@pytest.mark.usefixtures("quick")
def test_a_lock_that_somebody_removed_comes_back(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    (tmp_path / ".lock").unlink()
    until = time.monotonic() + 10
    while holder_of(tmp_path / ".lock") is None and time.monotonic() < until:
        time.sleep(0.01)
    with pytest.raises(LockedError):
        FolderLock(tmp_path)
    assert not lock.lost()
    lock.release()


@pytest.mark.rest
def test_a_job_that_has_ended_without_anybody_who_waits_for_it_is_dead(tmp_path: Path) -> None:
    """A zombie, as an orphan is in a container whose first process reaps nobody."""
    job = start(tmp_path, "leave")
    assert job.stdin is not None and job.stdout is not None
    job.stdin.write("\n\n")
    job.stdin.flush()
    assert job.stdout.readlines() == ["held\n", "still held\n"]
    os.waitid(os.P_PID, job.pid, os.WEXITED | os.WNOWAIT)
    FolderLock(tmp_path).release()
    job.communicate()


def test_a_link_whose_first_answer_was_lost_is_one_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", twice)
    lock = FolderLock(tmp_path)
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_ranks_of_one_job_take_the_folder_over_at_once(tmp_path: Path) -> None:
    """After the loss of a rank another rank of the job holds the folder, although the process before may live."""
    first = FolderLock(tmp_path, job="a")
    began = time.monotonic()
    second = FolderLock(tmp_path, job="a")
    assert time.monotonic() - began < folder_lock.BEAT_S / 10, "without a look at the heartbeat"
    assert first.lost() and not second.lost()
    first.release()
    assert holder_of(tmp_path / ".lock") is not None, "the lock is the second one's"
    for other in ("", "b", "ab"):
        with pytest.raises(LockedError):
            FolderLock(tmp_path, job=other)
    assert not second.lost()
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_a_job_takes_over_from_its_own_rank_on_another_host(tmp_path: Path) -> None:
    path = elsewhere(tmp_path)
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "token": "mine.0123"}))
    began = time.monotonic()
    lock = FolderLock(tmp_path, job="mine")
    assert time.monotonic() - began < folder_lock.BEAT_S / 10 and not lock.lost()
    lock.release()
