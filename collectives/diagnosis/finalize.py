"""Calls MPI_Finalize at Python's exit, in ranks but not in their forked children.

By default mpi4py calls MPI_Finalize after the end of Python, also in forked children. There it waits forever, because it needs the
threads of MPI, which a child does not have. So this module turns that off and calls MPI_Finalize itself. mpi4py reads the setting
`mpi4py.rc.finalize` once, when `mpi4py.MPI` is imported.
"""

import atexit
import os
import sys

from collectives.diagnosis.job import Job


def take_over() -> None:
    """Let this module end MPI, unless the program has set `mpi4py.rc.finalize = False` because it ends MPI itself."""
    import mpi4py

    if mpi4py.rc.finalize in (False, "no"):
        return
    if "mpi4py.MPI" in sys.modules:
        os.register_at_fork(after_in_child=lambda: atexit.register(_leave_child))
    else:
        mpi4py.rc.finalize = False
    atexit.register(_finalize, os.getpid())


def _finalize(process: int) -> None:
    """Call MPI_Finalize at Python's exit, while the arrays of unfinished messages are still alive."""
    if os.getpid() != process or "mpi4py.MPI" not in sys.modules:
        return
    from mpi4py import MPI

    # After the loss of a rank MPI_Finalize of Open MPI 5.0.11 stands still in one of five jobs. Nothing is left to do for MPI: the
    # monitors of the ranks that are left have ended together, and mpirun accepts an end without MPI_Finalize in such a job.
    if MPI.Is_initialized() and not MPI.Is_finalized() and Job.mpi is None and not Job.ends_alone:
        MPI.Finalize()


def _leave_child() -> None:
    """End a forked child in which mpi4py would wait forever. The child's own exit status is not known here."""
    from mpi4py import MPI

    if not MPI.Is_initialized() or MPI.Is_finalized():
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
