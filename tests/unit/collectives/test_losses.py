"""Parts of the detection of lost ranks that need no MPI: processes, words, and the failure file."""

import ctypes
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from collectives.diagnosis import loss, set_failure_file, write_failure
from collectives.diagnosis.hangs import losses
from collectives.diagnosis.hangs.node import process
from collectives.diagnosis.job import Job
from collectives.diagnosis.ring.goodbye import End, Heard
from collectives.diagnosis.ring.roster import NOBODY, Member, Roster
from collectives.transports.node.peer import PeerReader

ROSTER = Roster([Member(0, "a", 31), Member(0, "a", 32), Member(2, "b", 31), Member(2, "b", 47)])


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("MPITRAIN_FAILURE_FILE", raising=False)
    yield
    set_failure_file(None)


# Processes


def test_the_state_of_a_process_and_how_it_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        started = process.start_time(child.pid)
        assert started >= process.start_time(os.getpid()) > 0
        assert process.how_ended(child.pid) == ""
        child.send_signal(signal.SIGSTOP)
        wait_for_state(child.pid, "T")
        assert process.state(child.pid) == "T (stopped)"
        child.kill()
        wait_for_state(child.pid, "Z")
        assert process.how_ended(child.pid) == "was killed by signal 9 (SIGKILL)"
        assert process.start_time(child.pid) == 0, "a process that has ended is nobody's to signal"
    finally:
        child.kill()
        child.communicate()
    assert (process.state(child.pid), process.how_ended(child.pid), process.catches(child.pid, 34)) == ("", "", False)


def wait_for_state(pid: int, letter: str) -> None:
    end = time.monotonic() + 10
    while not process.state(pid).startswith(letter):
        assert time.monotonic() < end, process.state(pid)
        time.sleep(0.005)


def test_a_signal_is_only_free_if_nothing_handles_it() -> None:
    signum = process.free_signal()
    assert signal.SIGRTMIN <= signum <= signal.SIGRTMAX and not process.catches(os.getpid(), signum)
    before = signal.signal(signum, lambda *_: None)
    try:
        assert process.catches(os.getpid(), signum) and process.free_signal() != signum
    finally:
        signal.signal(signum, before)


# Words


def test_ranks_have_hosts_and_processes() -> None:
    assert ROSTER.name(3) == "rank 3 on b (process 47)"
    assert ROSTER.names([0, 1]) == "ranks 0, 1 on a (processes 31, 32)"
    assert ROSTER.names([1, 2, 3]) == "rank 1 on a (process 32), ranks 2, 3 on b (processes 31, 47)"
    assert Roster([Member(0, "a", rank) for rank in range(9)]).names(range(8)) == "ranks 0-7 on a"
    assert NOBODY.names([0, 1]) == "ranks 0, 1"
    assert Roster([Member(node, "x", 1) for node in (0, 1, 0, 1)]).ring() == [0, 2, 1, 3], (
        "the ranks of a node side by side"
    )


@pytest.mark.parametrize(
    ("how", "ranks", "words"),
    [
        (
            End.DEATH,
            (2,),
            "rank 2 on b (process 31) has died: its process ended without notice; it was killed by signal 9 (SIGKILL)",
        ),
        (
            End.SILENCE,
            (2, 3),
            "b is silent: it has not answered for 10 s, so it is down or its link is cut; there are ranks 2, 3 on b ",
        ),
        (End.ORPHAN, (2,), "rank 2 on b (process 31) has ended itself, because the launcher on its host has died"),
    ],
)
def test_what_was_lost(how: End, ranks: tuple[int, ...], words: str) -> None:
    heard = [Heard(2, how, 5, before) for before in (True, False)]  # a ring of two
    loss = losses.lost(heard, ROSTER, {2: "was killed by signal 9 (SIGKILL)"})
    assert loss.ranks == ranks
    assert loss.why.startswith(words) and "\n" not in loss.why
    two = losses.lost([heard[0], Heard(1, End.DEATH, 6, False)], ROSTER, {})
    assert two.ranks == (1, *ranks) and two.why.splitlines()[1].startswith("rank 1 on a (process 32) has died")


# The failure file


def test_the_first_report_makes_the_file_and_later_ones_follow_it(tmp_path: Path) -> None:
    file = tmp_path / "run/failure.txt"
    set_failure_file(file)
    reports = [f"report {number}\n" + f"line of {number}\n" * 50 for number in range(16)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write_failure, reports[:1] * 1))
        first = file.read_text()
        list(pool.map(write_failure, reports[1:]))
    text = file.read_text()
    assert text.startswith(first) and "report 0\nline of 0\n" in first
    assert all(report in text for report in reports), "none is mixed with another"
    assert list(file.parent.iterdir()) == [file]
    set_failure_file(None)
    write_failure("more")
    assert file.read_text() == text


def test_the_file_of_train_is_a_link_to_that_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_train, of_run = tmp_path / "failure", tmp_path / "run/failure.txt"
    monkeypatch.setenv("MPITRAIN_FAILURE_FILE", str(of_train))
    write_failure("before the run is known")
    assert "before the run" in of_train.read_text()
    of_train.unlink()
    set_failure_file(of_run)
    write_failure("a failure")
    assert of_train.read_text() == of_run.read_text() and of_run.read_text().count("a failure") == 1
    set_failure_file(None)  # another job holds the folder
    write_failure("the folder is held")
    assert "held" in of_train.read_text() and "held" not in of_run.read_text()


def test_a_job_that_no_longer_holds_the_folder_writes_no_report_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    of_run, of_train = tmp_path / "run/failure.txt", tmp_path / "failure"
    set_failure_file(of_run, told.append)
    write_failure("first\nof the first job")
    write_failure("second")
    assert told == ["first\nof the first job"]
    set_failure_file(of_run, told.append, lambda: False)
    monkeypatch.setenv("MPITRAIN_FAILURE_FILE", str(of_train))
    before = of_run.read_text()
    of_train.symlink_to(of_run)
    write_failure("late")
    assert of_run.read_text() == before and "late" in of_train.read_text() and len(told) == 1
    # The file of a supervisor is in the run's folder. A later launch of the supervisor has it too.
    monkeypatch.setenv("MPITRAIN_FAILURE_FILE", str(of_run.with_name(".failure")))
    write_failure("late")
    assert list(of_run.parent.iterdir()) == [of_run] and of_run.read_text() == before
    set_failure_file(None)


def test_a_file_that_cannot_be_written_is_no_further_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    set_failure_file(tmp_path / "file/failure.txt")
    monkeypatch.setenv("MPITRAIN_FAILURE_FILE", str(tmp_path / "on/another/host"))
    write_failure("a failure")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file"]
    assert stat.S_ISREG((tmp_path / "file").stat().st_mode)


def test_a_read_of_a_dead_rank_s_memory_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    monkeypatch.setattr(loss, "_REPORT_S", 0.0)
    target = ctypes.create_string_buffer(8)

    def read() -> None:
        with pytest.raises(ProcessLookupError, match=f"process {child.pid}"):
            PeerReader(child.pid).read(ctypes.addressof(target), ctypes.addressof(target), 8)

    read()
    assert loss.Known.since is None
    monkeypatch.setattr(Job, "survives", True)
    monkeypatch.setattr(loss.Known, "since", None)
    read()
    assert loss.Known.since is not None


def test_a_firewall_is_suspected_between_hosts_alone() -> None:
    assert "rank 1 on a (process 32) to rank 2 on b (process 31); perhaps a firewall" in losses.unreached(
        [(1, 2)], ROSTER
    )
    within = losses.unreached([(0, 1)], ROSTER)
    assert "firewall" not in within and "containers that share no /dev/shm" in within


def test_who_knows_how_a_rank_ended_speaks_for_those_that_guess() -> None:
    of_killed, of_crashed = (
        f"rank {rank} on a (process 7) has died: its process ended without notice" for rank in (1, 11)
    )
    guess, known = ", as by os._exit, a signal or a crash", "; it was killed by signal 9 (SIGKILL)"
    assert losses.without_guesses({of_killed + guess, of_killed + known}) == [of_killed + known]
    both = [of_killed + known, of_crashed + guess]
    assert losses.without_guesses(set(both)) == sorted(both)
    silent = "host2 is silent: it has not answered for 10 s"
    assert losses.without_guesses([silent, of_crashed + guess]) == [silent, of_crashed + guess]
