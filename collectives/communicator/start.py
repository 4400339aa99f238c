"""`world()`, the first Communicator of a job, and the set-up of the process before it and the end of the process after it."""

import atexit
import functools

from collectives import diagnosis
from collectives.communicator.communicator import Communicator, take_table
from collectives.diagnosis import finalize
from collectives.diagnosis.ending import Before
from collectives.diagnosis.hangs import deadline, monitor, notice
from collectives.diagnosis.job import all_ranks
from collectives.diagnosis.record import Log
from collectives.diagnosis.start import meeting
from collectives.diagnosis.start.initialize import start_mpi
from collectives.environment import check_choices, switch
from collectives.launcher import check_launcher, check_main_program, check_no_child, leave_mark
from collectives.progress.choice import choose_progress
from collectives.progress.progress import Progress
from collectives.selection import table_cache
from collectives.selection.table import Table, built_in

_world: Communicator | None = None


def world() -> Communicator:
    """The Communicator of all ranks, on a private clone of COMM_WORLD. The first call starts MPI and is collective.

    After it, an uncaught exception on one rank ends the job, so that the other ranks do not wait forever. An operation that waits
    longer than the deadline (MPITRAIN_DEADLINE_S, 600 s) ends the job, too; a notice on stderr comes after 30 s (MPITRAIN_NOTICE_S).
    The wait for ranks that have not come to this call yet, because they still import or work, ends by an error after the same deadline.
    SIGUSR2 prints the last operations. If the world was freed, `world()` makes a new one, which is collective again. RuntimeError if
    the launcher has started several ranks but MPI sees one: launcher and MPI library then belong to different MPIs; in a program that a
    rank has started; in a process of multiprocessing that imports a main program without `if __name__ == "__main__":`; and if the ranks
    have different versions of this package.
    """
    global _world
    if _world is None or _world.is_freed:
        check_main_program()
        check_no_child()
        try:
            progress = _stand_ready()
        except Exception:
            finalize.look_for_loss()  # the program may catch this, and call MPI.Finalize()
            raise
        comm = Communicator(all_ranks().Dup(), progress=progress, _name="world")
        take_table(comm, _measured_table(comm))
        _world = comm
    return _world


def restart() -> Communicator:
    """Make the world of the ranks that a loss has left, with the table of the world before. Collective over them."""
    global _world
    assert _world is not None
    comm = Communicator(all_ranks().Dup(), progress=_stand_ready(), checked=_world.checked, _name="world")
    take_table(comm, _world.table)
    _world = comm
    return comm


@functools.cache
def _stand_ready() -> Progress:
    """Set up the process, once, however many worlds it makes. Collective."""
    finalize.take_over()  # its exit hook runs after all hooks that are registered later
    start_mpi()
    from mpi4py import MPI

    from collectives.transports.gpu.device import connected

    vendor, version = MPI.get_vendor()
    check_launcher(MPI.COMM_WORLD.size, f"{vendor} {'.'.join(map(str, version))}")
    leave_mark()
    diagnosis.abort_on_uncaught(MPI.COMM_WORLD)
    meeting.meet(MPI.COMM_WORLD)
    clone = MPI.COMM_WORLD.Dup()
    if clone.size > 1:
        meeting.take_late_messages(MPI.COMM_WORLD)
    with diagnosis.together(clone, ""):
        check_choices()
        deadline.from_environment()
        notice.from_environment()
        meeting.notice_from_environment()
    checked = bool(switch("MPITRAIN_DEBUG"))
    progress = choose_progress(clone, MPI.Query_thread() == MPI.THREAD_MULTIPLE, checked)
    Before.others = connected
    monitor.start(clone, checked=checked)
    clone.Free()
    atexit.register(_close, progress)  # runs before the monitor's hook, which counts this rank as ended
    return progress


def _close(progress: Progress) -> None:
    """At exit: carry out operations for which other ranks may wait, unless an error, perhaps of this rank only, ends the process."""
    if diagnosis.ends_well():
        progress.close()


def _measured_table(comm: Communicator) -> Table:
    """The table measured on this machine with as many ranks and nodes, as rank 0 finds it; the built-in table fills its gaps."""
    if comm.size == 1:
        return built_in()
    measured = table_cache.read(comm.machine()) if comm.rank == 0 else None
    # A separate record, so that the first collective of the program has number 1.
    with Log(range(comm.size), "world()").enter("the measured table", root=0):
        data = comm.mpi.bcast(None if measured is None else measured.to_dict())
    return built_in() if data is None else Table.from_dict(data).over(built_in())
