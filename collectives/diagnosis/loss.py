"""The loss of ranks in a job that goes on without them: noticed by the monitor or by an error of MPI, ended by a recovery.

A rank that knows of a loss revokes all communicators of the package: MPI then raises an error in every rank that waits in them, or
enters them later. That rank revokes its own communicators in turn, so that no rank waits for a rank that has left.
"""

import os
import signal
import time
from contextlib import suppress

from collectives.diagnosis import dump
from collectives.diagnosis.hangs.deadline import Deadline
from collectives.diagnosis.job import Job, all_ranks, kept


class Loss:
    """The loss that this process knows of."""

    since: float | None = None  # by `time.monotonic`; None: no rank was lost
    is_handled = False  # whether the main thread has left its work for the recovery


def is_known() -> bool:
    """Whether a rank of the job was lost, as far as this process knows. It asks MPI, which knows it first where MPI has waited."""
    if not Job.survives:
        return False
    if Loss.since is None and (_num_failed() or any(mpi.Is_revoked() for mpi in kept())):
        note()
    return Loss.since is not None


def note() -> None:
    """Note that a rank was lost, and interrupt the waits of all ranks."""
    if Loss.since is None:
        Loss.since, Loss.is_handled = time.monotonic(), False
    revoke_all()


def revoke_all() -> None:
    """Revoke all communicators of the package on all their ranks. Not collective."""
    from mpi4py import MPI

    for mpi in kept():
        with suppress(MPI.Exception):
            if not mpi.Is_revoked():
                mpi.Revoke()


def begin_recovery() -> None:
    """The main thread has left its work, and will wait for the other ranks."""
    note()
    Loss.is_handled = True


def end_recovery() -> None:
    """The recovery has ended: this process knows of no loss."""
    Loss.since, Loss.is_handled = None, False


def end_if_late() -> None:
    """End this process if its main thread has not come to the recovery within the deadline: the other ranks go on without it."""
    if Loss.since is None or Loss.is_handled or not Deadline.seconds:
        return
    if time.monotonic() - Loss.since > Deadline.seconds:
        dump.dump(f"ranks were lost {Deadline.seconds:g} s ago, and this rank has not left its work; this process ends")
        os.kill(os.getpid(), signal.SIGKILL)


def _num_failed() -> int:
    """The number of ranks of the job that MPI knows to be dead."""
    group = all_ranks().Get_failed()
    num = group.size
    group.Free()
    return int(num)
