"""The loss of ranks in a job that goes on without them: noticed by the monitor or by an error of MPI, ended by a recovery.

A rank that knows of a loss revokes all communicators of the package: MPI then raises an error in every rank that waits in them, or
enters them later. That rank revokes its own communicators in turn, so that no rank waits for a rank that has left.
"""

import threading
import time
from contextlib import suppress
from typing import Any

from collectives.diagnosis.ending import begin_abort
from collectives.diagnosis.hangs.deadline import Deadline
from collectives.diagnosis.job import Job, all_ranks, kept

RECOVERING = "has come to the recovery from a loss\n"
"""The first line of the note of a rank that waits for the other ranks in a recovery."""

_MPI_S = 0.25  # for the launcher to tell MPI of a death, which takes milliseconds
_REPORT_S = 5.0  # for the report of a death and the end of the job


class Known:
    """The loss that this process knows of."""

    since: float | None = None  # by `time.monotonic`; None: no rank was lost
    is_handled = False  # whether the main thread has left its work for the recovery
    is_told = False  # whether the launcher has told MPI
    aborting: threading.Thread | None = None  # ends NCCL's communicators
    causes: list[str] = []  # noqa: RUF012 - what this process's monitor has said about losses, one line each


_noting = threading.Lock()  # the main thread and the monitor may both find a loss


def is_known() -> bool:
    """Whether a rank of the job was lost, as far as this process knows. It asks MPI, which knows it first where MPI has waited."""
    if not Job.survives:
        return False
    if Known.since is None and (num_failed() or any(map(_is_revoked, kept()))):
        note()
    return Known.since is not None


def note() -> None:
    """Note that a rank was lost, and interrupt the waits of all ranks.

    NCCL's kernels wait for the lost rank too. The host, which waits for them in its array library, goes on when they are aborted.
    """
    with _noting:
        if Known.since is None:
            Known.since, Known.is_handled, Known.is_told = time.monotonic(), False, False
            Known.aborting = begin_abort()
    revoke_all()


def peer_is_dead() -> None:
    """Another rank's process is gone, which this rank has found before MPI: note the loss.

    In a job that does not survive losses wait, because the neighbours of that rank report its death, and end the job.
    """
    if Job.survives:
        note()
    else:
        time.sleep(_REPORT_S)


def revoke_all() -> None:
    """Revoke all communicators of the package on all their ranks. Not collective."""
    from mpi4py import MPI

    valid = [mpi for mpi in kept() if not _is_revoked(mpi)]
    if valid:
        _wait_for_mpi()
    for mpi in valid:
        with suppress(MPI.Exception):
            mpi.Revoke()


def _is_revoked(mpi: Any) -> bool:
    """Whether a communicator is revoked. False for one that another thread frees meanwhile."""
    from mpi4py import MPI

    with suppress(MPI.Exception):
        return bool(mpi.Is_revoked())
    return False


def _wait_for_mpi() -> None:
    """Wait until MPI knows of a dead rank too, because a revocation sends messages to all ranks that MPI takes for alive.

    Open MPI 5.0.11 stands still if a thread sends by TCP to a dead rank while another one receives the end of the same connection:
    the first holds the connection's lock and waits for the handler of the second, which waits for the lock.
    """
    from mpi4py import MPI

    until = time.monotonic() + _MPI_S
    while not num_failed() and time.monotonic() < until:
        if threading.current_thread() is threading.main_thread():
            MPI.COMM_SELF.Iprobe()  # lets MPI progress, as the wait does in which the monitor finds this thread
        time.sleep(0.001)


def begin_recovery() -> None:
    """The main thread has left its work, and will wait for the other ranks. NCCL's communicators end first."""
    note()
    if Known.aborting is not None:
        Known.aborting.join()  # the monitor ends this process if it takes longer than the deadline
    Known.is_handled = True


def interrupt_recovery() -> None:
    """During a recovery: interrupt its waits if another rank was lost meanwhile, because the ranks that know it have left them."""
    if Known.is_handled and (num_failed() or any(map(_is_revoked, kept()))):
        revoke_all()


def is_told() -> bool:
    """Whether MPI has known of the loss at any time: after the recovery has left the dead ranks out, MPI knows of none."""
    Known.is_told = Known.is_told or num_failed() > 0
    return Known.is_told


def end_recovery() -> None:
    """The recovery has ended: this process knows of no loss."""
    Known.since, Known.is_handled = None, False


def is_late(grace_s: float = 0.0) -> bool:
    """Whether the recovery from a loss has lasted longer than the deadline and `grace_s`: then a rank has not come to it."""
    since, deadline_s = Known.since, Deadline.seconds
    return since is not None and bool(deadline_s) and time.monotonic() - since > (deadline_s or 0.0) + grace_s


def seconds() -> float:
    """The time since this process knows of the loss; 0 if it knows of none."""
    since = Known.since
    return 0.0 if since is None else time.monotonic() - since


def num_failed() -> int:
    """The number of ranks of the job that MPI knows to be dead."""
    group = all_ranks().Get_failed()
    num = group.size
    group.Free()
    return int(num)
