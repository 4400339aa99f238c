"""The ranks of the job: those that the launcher has started, or those that are left after the loss of others (see recovery.py).

All MPI communicators of this package are noted here, so that a loss can interrupt the waits in all of them.
"""

import weakref
from typing import Any


class Job:
    """The job of this process."""

    mpi: Any = None  # mpi4py's communicator of the ranks that are left; None before a recovery
    survives = False  # whether the other ranks go on after the loss of a rank
    ends_alone = False  # whether ranks were lost at the end, so that this rank waits for no other one
    is_done = False  # whether all ranks have come to the end, so that this rank may leave


_kept: "list[weakref.ref[Any]]" = []


def all_ranks() -> Any:
    """mpi4py's communicator of all ranks of the job. Only `Dup`, `Split` and queries: no message may use it."""
    from mpi4py import MPI

    return MPI.COMM_WORLD if Job.mpi is None else Job.mpi


def keep(mpi: Any) -> Any:
    """Note a communicator of this package, which `revoke_all` interrupts; returns it."""
    _kept[:] = [each for each in _kept if each() is not None]
    _kept.append(weakref.ref(mpi))
    return mpi


def kept() -> list[Any]:
    """The noted communicators that were not freed."""
    return [mpi for each in _kept if (mpi := each()) is not None and mpi]


def forget_all() -> None:
    """Forget the communicators of the ranks before a loss."""
    _kept.clear()
