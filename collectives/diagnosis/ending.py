"""NCCL's communicators end before MPI: by all ranks together, or by each rank alone where an error ends the job."""

import threading
import time
from contextlib import suppress
from typing import Any, Protocol

from collectives.diagnosis import goodbye

_ABORT_S = 2.0  # at most for an abort, before the job is ended all the same
_YIELD_S = 5.0  # at most for another thread that is about to end the job

_ending = threading.RLock()


class Others(Protocol):
    """Resources that end before MPI."""

    def __bool__(self) -> bool:
        """Whether there is anything."""

    def settle(self) -> bool:
        """Wait until its operations have ended; whether they have, without an error. All ranks have ended their programs."""

    def end(self, *, well: bool) -> None:
        """`well`: by all ranks together. Else by this rank alone, at once, without waiting for other ranks."""


class Before:
    """The resources of this process that end before MPI."""

    others: Others | None = None


def end_together(mpi: Any, *, well: bool) -> None:
    """Wait for the end of all ranks' programs. Then end what ends before MPI, in one way on all ranks. `well`: no error here."""
    others = Before.others
    well, has_none = _on_all(mpi, well, not others)
    if others and well:
        (well,) = _on_all(mpi, others.settle())
    elif not has_none and well:
        _on_all(mpi, True)
    if others:
        others.end(well=well)


def _on_all(mpi: Any, *mine: bool) -> list[bool]:
    """Which of these are true on all ranks: once all have come here."""
    from mpi4py import MPI

    flags = bytearray(mine)
    request, nap_s = mpi.Iallreduce(MPI.IN_PLACE, [flags, len(flags), MPI.BYTE], MPI.BAND), 1e-4
    while not request.Test():
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, 1e-2)
    return [bool(flag) for flag in flags]


def claim() -> None:
    """This thread is about to end the job. A thread that comes later waits here, and dies with the job.

    The first one's abort of NCCL lets others run into errors, which are not to be what the job ends with.
    """
    _ending.acquire(timeout=_YIELD_S)


def abort_job(code: int) -> None:
    """End all ranks by MPI_Abort, with this exit code; what ends before MPI gets two seconds for it."""
    from mpi4py import MPI

    claim()
    others = Before.others
    if others:
        thread = threading.Thread(target=others.end, kwargs={"well": False}, daemon=True)
        with suppress(RuntimeError):  # at Python's own end no thread starts
            thread.start()
            thread.join(_ABORT_S)
    goodbye.say()
    MPI.COMM_WORLD.Abort(code)
