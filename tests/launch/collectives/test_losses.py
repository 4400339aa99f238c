"""Failures of real jobs: all ranks end, with an exit code, a report that names the rank, and the same report in the failure file.

The limits of time are those that the documentation gives.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from extent import FULL, extent
from hosts import CLUSTER, cluster, need_namespaces
from launching import ROOT, Result, clean_environment, end_session, is_open_mpi, job_environment, run
from other_load import OtherLoad

MPICH = ROOT / ".venv/mpich"
HEADER = """
import ctypes, os, signal, subprocess, sys, time
import numpy as np, collectives
comm = collectives.world()
comm.barrier()
"""
X = "np.ones(4, np.float32)"
ENDS_S = 10.0  # after a failure


def command(mpi: str, num_ranks: int, script: str) -> tuple[list[str], dict[str, str]]:
    """A job's command line, and what it adds to the environment. `mpi`: openmpi, mpich, or mpich as mpirun/train starts it."""
    mpirun, settings = job_environment(num_ranks)
    if mpi.startswith("mpich"):
        if not (MPICH / "bin/mpirun").exists():
            pytest.skip("PyPI's MPICH is not installed")
        mpirun, settings = str(MPICH / "bin/mpirun"), {**settings, "MPI4PY_LIBMPI": str(MPICH / "lib/libmpi.so.12")}
    elif not is_open_mpi():
        pytest.skip("needs Open MPI")
    before = rank_words(mpirun) if "train" in mpi else []
    return [mpirun, "-np", str(num_ranks), *before, sys.executable, "-c", HEADER + script], settings


def rank_words(mpirun: str) -> list[str]:
    """The words that mpirun/train puts before the command of a rank."""
    script = '. "$1"; mpirun=$2; rank_words ""; printf "%s\\0" "${as_rank[@]}"'
    line = ["bash", "-c", script, "bash", str(ROOT / "mpirun/lib.sh"), mpirun]
    return subprocess.run(line, capture_output=True, text=True, check=True, timeout=20).stdout.split("\0")[:-1]


def job(mpi: str, num_ranks: int, script: str, **env: str) -> Result:
    line, settings = command(mpi, num_ranks, script)
    return run(line, cwd=ROOT, env={**settings, **env}, timeout_s=40)


# What ends a rank

SEGFAULT, KILL, ERROR, LATE = (
    "ctypes.string_at(0)",
    "os.kill(os.getpid(), signal.SIGKILL)",
    "raise KeyError('its own')",
    "time.sleep(60)",
)
BANNERS = "MPI_ABORT was invoked|prterun noticed|prterun has exited|BAD TERMINATION|application called MPI_Abort"


@pytest.mark.parametrize(
    ("mpi", "end"),
    [
        ("openmpi", SEGFAULT),
        ("openmpi", ERROR),
        ("mpich by mpirun/train", KILL),
        ("mpich", ERROR),
        *extent(
            [],
            [
                *[("openmpi", KILL), ("openmpi", LATE), ("mpich", KILL), ("mpich", SEGFAULT), ("mpich", LATE)],
                *[("mpich by mpirun/train", end) for end in (SEGFAULT, ERROR, LATE, "os._exit(3)", "sys.exit(3)")],
            ],
        ),
    ],
)
@pytest.mark.rest
def test_all_ranks_end_and_the_report_comes_first(mpi: str, end: str, tmp_path: Path) -> None:
    script = f"""
time.sleep(0.6)
if comm.rank == 1:
    open(os.environ["SINCE"], "w").write(str(time.time()))
    {end}
comm.all_reduce({X})
"""
    file, since = tmp_path / "failure.txt", tmp_path / "since"
    env = {"MPITRAIN_FAILURE_FILE": str(file), "SINCE": str(since), "MPITRAIN_DEADLINE_S": "2"}
    result = job(mpi, 3, script, **env)
    assert result.returncode != 0, str(result)
    assert time.time() - float(since.read_text()) < ENDS_S + 2.0 * (end == LATE), str(result)
    words = {
        ERROR: r"rank 1 on \S+ \(process \d+\) ends by an uncaught KeyError\n",
        LATE: r"missing: rank 1 on \S+ \(process \d+\) \(is in no operation\)\n",
        "sys.exit(3)": r"rank 1 on \S+ \(process \d+\) has ended, and ranks 0, 2 wait for it",
    }.get(end, r"rank 1 on \S+ \(process \d+\) has died: its process ended without notice")
    said = re.search(words, result.stderr)
    if mpi == "mpich" and end in (KILL, SEGFAULT):
        # MPICH's mpirun kills the other ranks within a millisecond, perhaps before one of them has reported. It names the process then.
        assert said or re.search(r"PID \d+ RUNNING AT", result.stdout + result.stderr), str(result)
        return
    assert said, str(result)
    report = file.read_text()
    assert re.search(words, report), f"{report}\n{result}"
    last = report.splitlines()[-1]
    at, banner = result.stderr.rfind(last), re.search(BANNERS, result.stderr)
    assert at >= 0, f"the whole report is printed: {last}\n{result}"
    assert banner is None or at < banner.start(), str(result)
    assert "Traceback (most recent call last)" in report or end != ERROR
    assert sorted(each.name for each in tmp_path.iterdir()) == ["failure.txt", "since"], "no part of a report"


# Ranks that do not end, but do not go on either: the first rank waits for all others.

STUCK = f"""
def hold_the_gil():
    mutex = ctypes.create_string_buffer(64)  # of zeros: it is not locked yet
    while True:
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)  # unlike a sleep, no signal ends the second one
def read_a_fifo():
    path = os.path.join(os.environ["FOLDER"], f"fifo-{{comm.rank}}")
    os.mkfifo(path)
    open(path).read()
time.sleep(1.0)
kind = sys.argv[1].split(",")[comm.rank]
if kind == "sleep":
    time.sleep(60)
elif kind == "stop":
    os.kill(os.getpid(), signal.SIGSTOP)
elif kind == "gil":
    hold_the_gil()
elif kind == "io":
    read_a_fifo()
elif kind == "skip":
    comm.broadcast({X})
comm.all_reduce({X})
"""
# By kind: what the report says about the rank, and what the verdict says.
SAID = {
    "sleep": (r"in no operation, main thread at <string>:\d+ in <module>", "in no operation"),
    "io": (r"in no operation, main thread at <string>:\d+ in read_a_fifo", "in no operation"),
    "stop": (r"no answer yet; state of its process: T \(stopped\)", "no answer yet"),
    "gil": (r"no answer yet; state of its process: S \(sleeping\)", "no answer yet"),
    "skip": (r"in world \(ranks [-\d]+\): #\d+ broadcast\(", "a different operation of the same communicator"),
}


def ranks_in(words: str) -> list[int]:
    """The ranks that words name, such as "ranks 1, 4 on host1 (processes 31, 34), rank 6 on host2 (process 31)"."""
    names = re.findall(r"ranks? ([-\d, ]+) on \S+ \(process", words)
    runs = [run.split("-") for name in names for run in name.split(", ")]
    return [rank for run in runs for rank in range(int(run[0]), int(run[-1]) + 1)]


def check_report(result: Result, kinds: list[str], *, limit_s: float, load: OtherLoad) -> None:
    """`limit_s`: how long after the deadline the report may come where this job has the cores for itself."""
    limit_s *= 1 + load.cores()
    assert result.returncode == 124, str(result)
    text = result.stderr.replace("\r", "")
    waited = re.search(r"rank 0 on \S+ \(process \d+\) has waited (\d+\.\d) s in .*the deadline is 2 s", text)
    assert waited, str(result)
    assert float(waited[1]) < 2.0 + limit_s, str(result)
    (verdict,) = re.findall(r"=> missing: (.*)", text)
    reasons = {
        rank: reason
        for group in verdict.split("; ")
        for rank in ranks_in(group)
        for reason in [group.rpartition(" (")[2]]
    }
    assert sorted(reasons) == [rank for rank, kind in enumerate(kinds) if kind != "wait"], str(result)
    for rank, reason in reasons.items():
        place, why = SAID[kinds[rank]]
        assert any(rank in ranks_in(line) and re.search(f"\\): {place}", line) for line in text.splitlines()), (
            f"{rank}\n{result}"
        )
        assert why in reason, str(result)
    if "gil" in kinds:
        assert re.search(r"its stacks, as faulthandler wrote them:(.*\n)+?.*line \d+ in hold_the_gil", text), str(
            result
        )
    assert re.search(r"its last record, \d\.\d s old:\n(.*\n){1,3}?.*#1 barrier", text), str(result)
    assert "dead" not in text.replace("deadline", ""), str(result)


@pytest.mark.rest
@pytest.mark.parametrize("mpi", ["openmpi", *extent([], ["mpich"])])
def test_each_rank_that_does_not_come_is_named_in_time(mpi: str, tmp_path: Path) -> None:
    kinds = ["wait", "sleep", "stop", "gil", "io", "skip"]
    line, settings = command(mpi, len(kinds), STUCK)
    env = {**settings, "MPITRAIN_DEADLINE_S": "2", "FOLDER": str(tmp_path)}
    load = OtherLoad()
    check_report(run([*line, ",".join(kinds)], cwd=ROOT, env=env, timeout_s=60), kinds, limit_s=2.0, load=load)


@pytest.mark.rest
def test_each_rank_that_does_not_come_is_named_in_time_on_two_hosts(tmp_path: Path) -> None:
    need_namespaces()
    kinds = ["wait", "sleep", "wait", "stop", "io", "gil"]
    env = {"MPITRAIN_DEADLINE_S": "2", "FOLDER": str(tmp_path)}
    load = OtherLoad()
    result = cluster("-H", "2x3", "python", "-c", HEADER + STUCK, ",".join(kinds), env=env, timeout_s=60)
    check_report(result, kinds, limit_s=7.0, load=load)


# The launcher dies


@pytest.mark.rest
@pytest.mark.parametrize("mpi", ["openmpi", "mpich", *extent([], ["mpich by mpirun/train"])])
def test_ranks_whose_mpirun_was_killed_end_and_write_nothing(mpi: str, tmp_path: Path) -> None:
    script = """
open(os.path.join(os.environ["FOLDER"], f"{comm.rank}.pid"), "w").write(str(os.getpid()))
comm.barrier()
comm.recv(np.ones(1), 1 - comm.rank)
"""
    line, settings = command(mpi, 2, script)
    folder = tmp_path / "pids"
    folder.mkdir()
    env = {
        **clean_environment(),
        **settings,
        "FOLDER": str(folder),
        "MPITRAIN_FAILURE_FILE": str(tmp_path / "failure.txt"),
    }
    with (tmp_path / "output").open("w") as output:
        mpirun = subprocess.Popen(line, env=env, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
    try:
        wait_for(lambda: len([file for file in folder.iterdir() if file.read_text()]) == 2, 30)
        pids = [int(file.read_text()) for file in folder.iterdir()]
        mpirun.kill()
        wait_for(lambda: not any(is_running(pid) for pid in pids), ENDS_S)
    finally:
        end_session(mpirun)
    assert not (tmp_path / "failure.txt").exists()
    assert "The job ends" not in (tmp_path / "output").read_text()


def wait_for(condition: Callable[[], bool], seconds: float) -> float:
    """Wait until the condition holds. Returns how long this took."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds, f"not within {seconds:g} s"
        time.sleep(0.02)
    return time.monotonic() - begun


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# Hosts


@pytest.mark.rest
def test_a_death_on_another_host_is_reported_at_once() -> None:
    need_namespaces()
    script = """
if comm.rank == 2:
    print("killed at", time.time(), flush=True)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(30)
"""
    result = cluster("-H", "2x2", "python", "-c", HEADER + script, timeout_s=40)
    assert result.returncode != 0, str(result)
    assert re.search(r"\[rank [13]\] rank 2 on host2 \(process \d+\) has died", result.stderr), str(result)
    assert result.stderr.count("has died") == 1, str(result)
    killed = re.search(r"killed at (\S+)", result.stdout)
    assert killed and time.time() - float(killed[1]) < 0.3 + ENDS_S, str(result)


@pytest.mark.rest
def test_a_job_ends_if_a_stuck_rank_is_alone_on_its_host() -> None:
    """The other ranks would go on without it, but nobody on its host can end it."""
    need_namespaces()
    script = """
from collectives import recovery
recovery.survive_losses()
comm.barrier()
if comm.rank == 1:
    print("stopped at", time.time(), flush=True)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGSTOP)
comm.barrier()
"""
    env = {"MPITRAIN_DEADLINE_S": "2"}
    result = cluster("-H", "2x1", "--", "--with-ft", "ulfm", "python", "-c", HEADER + script, env=env, timeout_s=50)
    assert result.returncode != 0, str(result)
    assert "rank 1 on host2 (process" in result.stderr and "could not be ended from another host" in result.stderr, str(
        result
    )
    stopped = re.search(r"stopped at (\S+)", result.stdout)
    assert stopped and time.time() - float(stopped[1]) < 2.0 + 4 * ENDS_S, str(result)


@pytest.mark.rest
def test_a_cut_link_ends_the_ranks_on_both_sides(tmp_path: Path) -> None:
    """The ranks write to files: mpirun cannot forward what the other side prints. mpirun itself waits for that host for ever."""
    need_namespaces()
    script = """
log = open(os.path.join(os.environ["FOLDER"], f"{comm.rank}.log"), "w")
os.dup2(log.fileno(), 2)
comm.barrier()
time.sleep(0.5)
if comm.rank == comm.size - 1:
    subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
open(os.path.join(os.environ["FOLDER"], f"{comm.rank}.ready"), "w").close()
time.sleep(60)
"""
    env = {**clean_environment(), "FOLDER": str(tmp_path), "MARK": str(tmp_path)}
    line = [CLUSTER, "run", "-H", "2x2", "--timeout", "60", "--", "python", "-c", HEADER + script]
    ranks: list[int] = []

    def of_job() -> list[int]:
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if is_rank(pid, str(tmp_path))]

    with (tmp_path / "output").open("w") as output:
        job = subprocess.Popen(line, env=env, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
    try:
        wait_for(lambda: len(list(tmp_path.glob("*.ready"))) == 4, 30)
        ranks = of_job()
        assert len(ranks) == 4, ranks
        logs = [tmp_path / f"{rank}.log" for rank in range(4)]
        wait_for(
            lambda: all(any("is silent" in log.read_text() for log in side) for side in (logs[:2], logs[2:])), 15.0
        )
        wait_for(lambda: not any(is_running(pid) for pid in ranks), ENDS_S)
    finally:
        job.send_signal(signal.SIGTERM)
        job.wait(20)
    texts = [log.read_text() for log in logs]
    for side, other in ((texts[:2], 2), (texts[2:], 1)):
        assert f"host{other} is silent: it has not answered for 10 s" in "".join(side), texts
        assert "has died" not in "".join(side), texts


def is_rank(pid: int, mark: str) -> bool:
    """Whether a process is a rank of the job that has `mark` in its environment."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return f"MARK={mark}".encode() in environment and any(
            each.startswith(b"OMPI_COMM_WORLD_RANK=") for each in environment
        )
    except OSError:
        return False


@pytest.mark.skipif(not FULL, reason="takes longer than a host may be silent: in a full run")
def test_a_rank_that_is_stopped_is_not_a_silent_host() -> None:
    """The kernel answers for it."""
    need_namespaces()
    seconds = 14
    script = f"""
if comm.rank == 1:
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {{os.getpid()}}"])
    os.kill(os.getpid(), signal.SIGSTOP)
print("sum", comm.all_reduce(np.ones(1))[0], flush=True)
"""
    result = cluster("-H", "2x1", "python", "-c", HEADER + script, timeout_s=40)
    assert (result.returncode, result.stdout.count("sum 2.0")) == (0, 2), str(result)
    assert "[rank " not in result.stderr and result.seconds > seconds, str(result)


def test_neighbours_without_a_connection_are_told_and_the_job_goes_on() -> None:
    """As behind a firewall: the only address that a rank knows of the other is one that does not answer."""
    need_namespaces()
    script = """
from collectives.diagnosis.ring import addresses
addresses.chosen = lambda: ["10.77.0.99"]
""" + HEADER.replace("comm.barrier()", "print('size', comm.all_reduce(np.ones(1))[0], flush=True)")
    result = cluster("-H", "2x1", "python", "-c", script, timeout_s=40)
    assert (result.returncode, result.stdout.count("size 2.0")) == (0, 2), str(result)
    assert result.stderr.count("no connection from ") == 1, str(result)
    assert re.search(
        r"\[rank 0\] notice: no connection from rank 0 on host1 \(process \d+\) to rank 1 on host2 .*, and 1 more pair",
        result.stderr,
    ), str(result)
