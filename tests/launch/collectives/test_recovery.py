"""Ranks that leave a job which survives losses: however they end, the others recover and go on at once."""

import re

import pytest
from extent import FULL, extent
from launching import ROOT, Result, is_open_mpi, launch

pytestmark = pytest.mark.skipif(not is_open_mpi(), reason="ULFM is a part of Open MPI")

# Each round sums 1 over the ranks that are left. The rank that started as number n leaves in the middle of round n.
LOOP = """
import os, sys, threading, time
import numpy as np, collectives
from collectives import recovery
from collectives.diagnosis import job

comm = collectives.world()
recovery.survive_losses()
me, number = comm.rank, comm.size - 1

def leave():
    {leave}

def rounds():
    global comm, number
    while True:
        try:
            while number:
                comm.barrier()
                if me == number:
                    number = -1
                    began = time.time()
                    print(f"leaves {{me}} at {{began}}", flush=True)
                    leave()
                    return
                comm.all_reduce(np.ones(3))
                time.sleep(0.02)
            if recovery.all_are_done():
                print(f"sum {{comm.all_reduce(np.ones(1))[0]}}", flush=True)
                return
        except Exception as error:
            if not recovery.ranks_were_lost():
                raise
            error.__traceback__ = None
            del error
        comm = recovery.recover()
        number -= 1
        if comm.rank == 0:
            print(f"recovered {{comm.size}} at {{time.time()}}", flush=True)

rounds()
"""


def job(num_ranks: int, leave: str) -> Result:
    env = {"PYTHONPATH": str(ROOT)}
    return launch(
        num_ranks, "-c", LOOP.format(leave=leave), options=["--with-ft", "ulfm"], cwd=ROOT, env=env, timeout_s=50
    )


def seconds(result: Result) -> list[float]:
    """The times from each leave to the end of its recovery."""
    lines = re.findall(r"(?:leaves|recovered) \d+ at (\d+\.\d+)", result.stdout)
    times = sorted(map(float, lines))
    return [after - before for before, after in zip(times[::2], times[1::2], strict=True)]


@pytest.mark.rest
def test_ranks_that_end_by_themselves_are_lost_and_the_others_go_on() -> None:
    """An exit of Python's, also in a thread, an uncaught SystemExit, and the end of the script."""
    ways = """[
        None,
        lambda: None,
        lambda: sys.exit(3),
        lambda: os._exit(3),
    ][me]()"""
    result = job(4, ways)
    assert result.returncode == 0, str(result)
    assert re.findall(r"sum (\S+)", result.stdout) == ["1.0"], str(result)
    assert re.findall(r"recovered (\d)", result.stdout) == ["3", "2", "1"], str(result)
    by_exit, by_system_exit, by_return = seconds(result)
    assert by_exit < 3.0, str(result)
    assert max(by_system_exit, by_return) < 7.0, str(result)
    assert re.search(r"rank 3 on \S+ \(process \d+\) ends by os\._exit\(3\)\. The other ranks go on", result.stderr)
    assert len(re.findall(r"has ended, and .*\. The job goes on without rank \d on \S+ \(process", result.stderr)) == 2


# Rank 3 dies, and rank 2 is stopped on its way through the recovery.
STOP = """
import os, signal
import numpy as np, collectives
from collectives import recovery
from collectives.communicator import start
from collectives.diagnosis.ring import roster

comm = collectives.world()
recovery.survive_losses()

def stopping(call):
    def stop(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGSTOP)
        return call(*args, **kwargs)
    return stop

if comm.rank == 2:
    {place} = stopping({place})
if comm.rank == 3:
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    try:
        comm.all_reduce(np.ones(3))
        if comm.size == 2 and recovery.all_are_done():
            break
    except Exception as error:
        if not recovery.ranks_were_lost():
            raise
        error.__traceback__ = None
        del error
        comm = recovery.recover()
print(f"left {{comm.size}}", flush=True)
"""


def stopped_in(place: str) -> Result:
    env = {"PYTHONPATH": str(ROOT), "MPITRAIN_DEADLINE_S": "2"}
    command = ("-c", STOP.format(place=place))
    return launch(4, *command, options=["--with-ft", "ulfm"], cwd=ROOT, env=env, timeout_s=80)


@pytest.mark.rest
def test_a_rank_that_stops_while_the_new_world_is_made_is_lost_too() -> None:
    result = stopped_in("start.Communicator")
    assert result.returncode == 0 and result.stdout.count("left 2") == 2, str(result)
    assert re.search(r"rank 2 on \S+ \(process \d+\).*stopped", result.stderr), str(result)


@pytest.mark.skipif(not FULL, reason="ends 20 s after the deadline: in a full run")
def test_a_rank_that_stops_before_the_monitors_have_found_each_other_ends_the_job() -> None:
    result = stopped_in("roster.gather")
    assert result.returncode == 124, str(result)
    assert "the recovery from a loss has not ended within the deadline of 2 s" in result.stderr, str(result)


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [("from mpi4py import MPI", "sys.exit(3)", 3), ("", "from mpi4py import MPI; MPI.Finalize()", 0)],
)
def test_mpi_finalize_does_not_wait_for_a_lost_rank(before: str, after: str, code: int) -> None:
    """mpi4py calls it if it is imported first, and the program may. It stood still in one of five jobs."""
    script = f"{before}\n{LOOP.format(leave='os.kill(os.getpid(), 9)')}\n{after}\n"
    env = {"PYTHONPATH": str(ROOT)}
    for _ in range(extent(1, 10)):
        result = launch(2, "-c", script, options=["--with-ft", "ulfm"], cwd=ROOT, env=env, timeout_s=30)
        assert (result.returncode, result.stdout.count("sum 1.0")) == (code, 1), str(result)
        assert result.seconds < 15, str(result)


# Rank 1 dies while rank 0 waits for it in world().
BEFORE = """
import os, sys, time
from mpi4py import MPI
import collectives
if MPI.COMM_WORLD.rank == 1:
    time.sleep(0.1)
    os.kill(os.getpid(), 9)
try:
    collectives.world()
except Exception as error:
    print("caught", type(error).__name__, flush=True)
    {end}
    sys.exit(3)
"""


@pytest.mark.parametrize("end", ["pass", "MPI.Finalize()"][: extent(1, 2)])
def test_mpi_finalize_does_not_wait_for_a_rank_that_was_lost_before_the_world(end: str) -> None:
    for _ in range(extent(1, 10)):
        command = ("-c", BEFORE.format(end=end))
        result = launch(
            2, *command, options=["--with-ft", "ulfm"], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, timeout_s=30
        )
        assert (result.returncode, result.stdout) == (3, "caught Exception\n"), str(result)
        assert result.seconds < 15, str(result)
