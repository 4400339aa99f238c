"""How a job's ranks come together: `world()`, the first Communicator, and what stands ready and ends with it."""

import atexit
import functools

from collectives import diagnosis
from collectives.communicator.communicator import Communicator, take_table
from collectives.diagnosis import finalize
from collectives.diagnosis.ending import Before
from collectives.diagnosis.hangs import deadline, monitor, notice
from collectives.diagnosis.record import Log
from collectives.environment import check_switches, switch
from collectives.launcher import check_launcher
from collectives.progress.work import Progress, choose_progress
from collectives.selection import table_cache
from collectives.selection.table import Table, built_in

_world: Communicator | None = None


def world() -> Communicator:
    """The one Communicator of all ranks, on a private clone of COMM_WORLD. Starts MPI at the first call, which is collective.

    From then on an uncaught exception on one rank ends the job instead of leaving the others to wait for ever. So does an operation
    that waits longer than the deadline (MPITRAIN_DEADLINE_S, 600 s), of which a line on stderr tells after 30 s (MPITRAIN_NOTICE_S).
    SIGUSR2 prints the last operations. Where it was freed, a new one, which is collective again. RuntimeError where the launcher has
    started several ranks and MPI knows one: they are of different MPIs.
    """
    global _world
    if _world is None or _world.is_freed:
        progress = _stand_ready()
        from mpi4py import MPI

        comm = Communicator(MPI.COMM_WORLD.Dup(), progress=progress, _name="world")
        take_table(comm, _measured_table(comm))
        _world = comm
    return _world


@functools.cache
def _stand_ready() -> Progress:
    """What a process needs once, whatever becomes of its communicators. Collective."""
    finalize.take_over()  # its hook runs after those that are registered from here on
    from mpi4py import MPI

    from collectives.transports.gpu.device import connected

    vendor, version = MPI.get_vendor()
    check_launcher(MPI.COMM_WORLD.size, f"{vendor} {'.'.join(map(str, version))}")
    diagnosis.abort_on_uncaught(MPI.COMM_WORLD)
    clone = MPI.COMM_WORLD.Dup()
    with diagnosis.together(clone, ""):
        check_switches()
        deadline.from_environment()
        notice.from_environment()
    checked = bool(switch("MPITRAIN_DEBUG"))
    progress = choose_progress(clone, MPI.Query_thread() == MPI.THREAD_MULTIPLE, checked)
    Before.others = connected
    monitor.start(clone, checked=checked)
    clone.Free()
    atexit.register(_close, progress)  # runs before the monitor's hook, for which this rank has then ended
    return progress


def _close(progress: Progress) -> None:
    """At the end of the process: carry out what other ranks may wait for, unless an error ends it, which not all may have come to."""
    if diagnosis.ends_well():
        progress.close()


def _measured_table(comm: Communicator) -> Table:
    """What was measured on this machine for so many ranks and nodes, as rank 0 finds it, over the built-in table."""
    if comm.size == 1:
        return built_in()
    measured = table_cache.read(comm.machine()) if comm.rank == 0 else None
    # A record of its own: the first collective of the program is number 1.
    with Log(range(comm.size), "world()").enter("the measured table", root=0):
        data = comm.mpi.bcast(None if measured is None else measured.to_dict())
    return built_in() if data is None else Table.from_dict(data).over(built_in())
