"""Ends NCCL's communicators before MPI: all ranks together, or each rank alone if an error ends the job."""

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from collectives.diagnosis.dump import RecordOutput, say
from collectives.diagnosis.job import Job
from collectives.diagnosis.ring import goodbye

_ABORT_S = 2.0  # the longest wait for an abort of NCCL before the job ends
_YIELD_S = 5.0  # the longest wait for another thread that is ending the job
_FORWARD_S = 0.2  # for mpirun to forward what this rank has printed, before its own last lines, and for the ring's byte to go around
_EXIT_S = 4.0  # after MPI_Abort, which needs the launcher; that may be on a host that does not answer

_ending = threading.RLock()

end_process = os._exit
"""Ends this process at once, with its exit code, also in a job that survives losses: for a process whose job ends."""


class EndingResources(Protocol):
    """Resources that end before MPI."""

    def __bool__(self) -> bool:
        """Whether there are resources."""

    def settle(self) -> bool:
        """Wait until all operations have ended. Returns whether they have ended without an error. All ranks' programs have ended."""

    def end(self, *, well: bool) -> None:
        """End the resources: if `well`, with all ranks together; else on this rank alone, without a wait for other ranks."""


class LastWords:
    """Notes why this process ends by a signal of its own, where another rank of the node reads it. The monitor sets it."""

    note: Callable[[str], None] | None = None


class Before:
    """The resources of this process that end before MPI."""

    others: EndingResources | None = None


def end_together(mpi: Any, *, well: bool) -> None:
    """Wait for the end of all ranks' programs. Then end `Before.others` in the same way on all ranks. `well`: no error on this rank."""
    others = Before.others
    well, has_none = _on_all(mpi, well, not others)
    if others and well:
        (well,) = _on_all(mpi, others.settle())
    elif not has_none and well:
        _on_all(mpi, True)
    if others:
        others.end(well=well)


def _on_all(mpi: Any, *mine: bool) -> list[bool]:
    """For each flag of `mine`, whether it is true on all ranks. Collective."""
    from mpi4py import MPI

    flags = bytearray(mine)
    request, nap_s = mpi.Iallreduce(MPI.IN_PLACE, [flags, len(flags), MPI.BYTE], MPI.BAND), 1e-4
    while not request.Test():
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, 1e-2)
    return [bool(flag) for flag in flags]


def claim() -> None:
    """Let this thread end the job. A thread that calls this later waits here until the job has ended.

    The first thread's abort of NCCL causes errors in other threads, which must not end the job with another message.
    """
    _ending.acquire(timeout=_YIELD_S)


def abort_job(code: int) -> None:
    """End all ranks by MPI_Abort, with this exit code, after at most two seconds for the end of `Before.others`."""
    from mpi4py import MPI

    _abort_others()
    goodbye.say(goodbye.End.ABORT)
    time.sleep(_FORWARD_S)
    # A thread of C ends the process if MPI_Abort, which holds the GIL, does not.
    faulthandler.dump_traceback_later(_EXIT_S, exit=True, file=os.open(os.devnull, os.O_WRONLY))
    MPI.COMM_WORLD.Abort(code)
    end_process(code)  # MPICH's may return, and the caller would go on


def die(why: str) -> None:
    """End this process at once, as a loss for the other ranks. `why`: for them, such as "has ended by an uncaught ValueError".

    By a signal, because Open MPI's launcher tells MPI on the other ranks of no process that ends by itself, whatever its exit code.
    """
    if LastWords.note is not None:
        LastWords.note(why)
    os.kill(os.getpid(), signal.SIGKILL)


def leave_alone(why: str) -> None:
    """End only this process, without a goodbye: the other ranks of a job that survives losses go on without it. `why`: see `die`."""
    _abort_others()
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(_FORWARD_S)
    die(why)


def let_exits_be_losses() -> None:
    """From now on `os._exit` of this process is a loss for the other ranks, which go on: it ends by a signal, see `die`."""
    process = os.getpid()

    def leave(status: int) -> NoReturn:
        if os.getpid() == process and not Job.is_done:
            line = f"rank {RecordOutput.rank} on {socket.gethostname()} (process {process}) ends by os._exit({status})"
            say(f"{line}. The other ranks go on.")
            die(f"has ended by os._exit({status})")
        end_process(status)

    os._exit = leave


def begin_abort() -> threading.Thread | None:
    """Begin to end `Before.others` on this rank alone, in a thread, because it may take long; None if there is nothing to end."""
    others = Before.others
    if not others:
        return None
    thread = threading.Thread(target=others.end, kwargs={"well": False}, name="collectives-abort", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread can start at Python's exit
        return None
    return thread


def _abort_others() -> None:
    claim()
    if (thread := begin_abort()) is not None:
        thread.join(_ABORT_S)
