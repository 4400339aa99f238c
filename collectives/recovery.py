"""Continues on the ranks that are left after the loss of a rank, by Open MPI's User-Level Failure Mitigation (ULFM).

    recovery.survive_losses()                  # before the loss: it ends operations of the other ranks by an exception, not the job
    try: ...
    except Exception as error:
        if not recovery.ranks_were_lost(): raise
        del error                              # its frames keep arrays alive
        comm = recovery.recover()              # the new world; all communicators and Works from before the loss are unusable

A rank that finds a loss revokes all communicators of the package, so every rank leaves its wait, whichever ranks it waits for. Then
all ranks that are left call `recover`, which shrinks MPI_COMM_WORLD. A rank that does not come within the deadline counts as lost: see
`Monitor`. Source: Bland et al., "Post-failure recovery of MPI communication capability", IJHPCA 27 (2013).
"""

import os
import time
from contextlib import suppress

from collectives.communicator.communicator import Communicator
from collectives.communicator.start import restart, world
from collectives.diagnosis import finalize, job, loss, record
from collectives.diagnosis.ending import let_exits_be_losses
from collectives.diagnosis.hangs import monitor
from collectives.diagnosis.hangs.losses import without_guesses
from collectives.diagnosis.job import Job
from collectives.launcher import ULFM_VARIABLE, is_on
from collectives.progress.progress import of_this_process
from collectives.progress.unusable import Freed

_PAUSE_S = 0.05


def obstacle() -> str:
    """The reason why this job cannot go on after the loss of a rank; "" if it can. Call it after `world()`. The same on all ranks."""
    from mpi4py import MPI

    vendor, version = MPI.get_vendor()
    name = f"{vendor} {'.'.join(map(str, version))}"
    if vendor != "Open MPI" or version < (5, 0):
        return f"MPI is {name}; expected Open MPI 5 or later with ULFM, started by `mpirun --with-ft ulfm`"
    if not is_on(os.environ.get(ULFM_VARIABLE, "")):
        return "the job was started without ULFM; expected `mpirun --with-ft ulfm ...`"
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        return f"{name} has no MPI_THREAD_MULTIPLE, which the monitors of the ranks need"
    if finalize.may_stand_still():
        return (
            f"mpi4py.MPI was imported before collectives.world(), so mpi4py ends {name}, which may wait for a lost rank; expected "
            "collectives.world() before that import, or mpi4py.rc.finalize = False"
        )
    return ""


def survive_losses() -> None:
    """From now on the loss of a rank raises exceptions on the other ranks. RuntimeError if there is an `obstacle`."""
    if reason := obstacle():
        raise RuntimeError(f"survive_losses: {reason}")
    Job.survives = True
    let_exits_be_losses()


def ranks_were_lost() -> bool:
    """Whether a rank was lost since the start of the current world, as far as this rank knows."""
    return loss.is_known()


def all_are_done() -> bool:
    """Whether no rank was lost up to this call, with the same answer on all ranks that are left. Collective, also after a loss.

    A program that ends calls it first: if it returns False on one rank, all ranks call `recover`. A rank that ends before is lost.
    """
    from mpi4py import MPI

    if not Job.survives:
        return True
    with suppress(
        Exception
    ):  # in the record, so that a rank that ends before is found; the ranks that are left agree below
        world().barrier()
    try:
        Job.is_done = bool(job.all_ranks().Agree(int(not ranks_were_lost())))
    except MPI.Exception:
        Job.is_done = False
    return Job.is_done


def recover() -> Communicator:
    """Make a world of the ranks that are left, and return it. Collective over these ranks, each of which has seen the loss.

    The new world keeps the order of the ranks and the table of algorithms. Another loss meanwhile is part of the same recovery.
    """
    from mpi4py import MPI

    while True:
        try:
            loss.begin_recovery()  # again after another loss: `rejoin` has ended the recovery before
            for progress in list(of_this_process):
                if not isinstance(progress, Freed):
                    progress.drain()
            finalize.leave_out_barrier()
            left = MPI.COMM_WORLD.Shrink()
            job.forget_all()
            record.forget_logs()
            Job.mpi = job.keep(left)
            loss.Known.is_told = True
            monitor.rejoin(left)
            # In a record of its own, as in `world()`: the monitors now report a rank that does not come.
            with record.Log(range(left.size), "recover()").enter("the new world"):
                return restart()
        except MPI.Exception:
            # Another rank was lost. The ranks that have noticed nothing yet leave their calls when the others revoke them.
            time.sleep(_PAUSE_S)


def processes(comm: Communicator) -> "list[tuple[str, int]]":
    """The host and the process id of each rank. Collective."""
    there: list[tuple[str, int]] = comm.all_gather_object((os.uname().nodename, os.getpid()))
    return there


def causes(comm: Communicator, since: int) -> tuple[list[str], int]:
    """What the monitors of all ranks have said about losses, one line each, the same on all ranks. Collective.

    `since`: the number of this rank's lines that are known. The second value: their number now.
    """
    own = loss.Known.causes[since:]
    told = {cause for each in comm.all_gather_object(own) for cause in each}
    return without_guesses(told), since + len(own)
