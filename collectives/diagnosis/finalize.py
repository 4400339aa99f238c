"""Calls MPI_Finalize at Python's exit, in ranks but not in their forked children.

By default mpi4py calls MPI_Finalize after the end of Python, also in forked children. There it waits forever, because it needs the
threads of MPI, which a child does not have. So this module turns that off and calls MPI_Finalize itself. mpi4py reads the setting
`mpi4py.rc.finalize` once, when `mpi4py.MPI` is imported.
"""

import atexit
import ctypes
import os
import sys
from contextlib import suppress

from collectives.diagnosis.job import Job
from collectives.launcher import ULFM_VARIABLE, is_on


class _Ending:
    by_mpi4py = False  # whether mpi4py calls MPI_Finalize after the end of Python, if this module does not


def take_over() -> None:
    """Let this module end MPI, unless the program has set `mpi4py.rc.finalize = False` because it ends MPI itself."""
    import mpi4py

    if mpi4py.rc.finalize in (False, "no"):
        return
    if "mpi4py.MPI" in sys.modules:
        os.register_at_fork(after_in_child=lambda: atexit.register(_leave_child))
        _Ending.by_mpi4py = True
    else:
        mpi4py.rc.finalize = False
    atexit.register(_finalize, os.getpid())


def _finalize(process: int) -> None:
    """Call MPI_Finalize at Python's exit, while the arrays of unfinished messages are still alive."""
    if os.getpid() != process or not _mpi_runs():
        return
    from mpi4py import MPI

    # After a loss nothing is left to do for MPI: the monitors of the ranks that are left have ended together, and mpirun accepts an end
    # without MPI_Finalize in such a job.
    if Job.mpi is None and not Job.ends_alone:
        look_for_loss()
        MPI.Finalize()


def look_for_loss() -> None:
    """Let MPI_Finalize not wait for a rank that was lost before `world()` has started a monitor, which would have said so."""
    if not _mpi_runs() or not is_on(os.environ.get(ULFM_VARIABLE, "")):
        return
    from mpi4py import MPI

    with suppress(MPI.Exception, NotImplementedError):  # a library without ULFM
        if MPI.COMM_WORLD.Get_failed().size:
            leave_out_barrier()


def _mpi_runs() -> bool:
    """Whether MPI has started, and has not ended. It does not start MPI."""
    if "mpi4py.MPI" not in sys.modules:
        return False
    from mpi4py import MPI

    return MPI.Is_initialized() and not MPI.Is_finalized()


def leave_out_barrier() -> None:
    """After the loss of a rank: let MPI_Finalize, which mpi4py or the program may call, not wait for the lost rank.

    Its barrier stands still in one of five jobs of Open MPI 5.0.11. It is not needed: monitors of ranks end together.
    """
    if (has_none := _no_barrier()) is not None:
        has_none.value = True


def may_stand_still() -> bool:
    """Whether mpi4py calls MPI_Finalize at the end, since it was imported before `world()`, and MPI may then wait for a lost rank."""
    return _Ending.by_mpi4py and _no_barrier() is None


def _no_barrier() -> ctypes.c_bool | None:
    """Open MPI's setting async_mpi_finalize: whether MPI_Finalize has no barrier. None for a library without it."""
    from collectives.processes import mpi_libraries

    for path in mpi_libraries():
        with suppress(OSError, ValueError):
            return ctypes.c_bool.in_dll(ctypes.CDLL(path), "ompi_async_mpi_finalize")
    return None


def _leave_child() -> None:
    """End a forked child in which mpi4py would wait forever. The child's own exit status is not known here."""
    if not _mpi_runs():
        return
    if not hasattr(sys, "last_value"):
        print(
            "a forked child ends with exit status 1, because its own exit status is not known; call collectives.world() before "
            "mpi4py.MPI is imported, or end the child by os._exit",
            file=sys.stderr,
        )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
