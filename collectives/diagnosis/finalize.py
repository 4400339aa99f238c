"""The end of MPI: at Python's exit, and only in the ranks themselves.

mpi4py ends MPI when Python is gone, in forked children too. There MPI_Finalize waits for ever, since it needs the threads of MPI, and
a child has no copy of them. So mpi4py leaves MPI_Finalize to this file, and a child ends as any process. mpi4py reads that setting
once, when `mpi4py.MPI` is imported.
"""

import atexit
import os
import sys


def take_over() -> None:
    """From now on MPI ends by this file, unless the program has said by `mpi4py.rc.finalize = False` that it ends MPI itself."""
    import mpi4py

    if mpi4py.rc.finalize in (False, "no"):
        return
    if "mpi4py.MPI" in sys.modules:
        os.register_at_fork(after_in_child=lambda: atexit.register(_leave_child))
    else:
        mpi4py.rc.finalize = False
    atexit.register(_finalize, os.getpid())


def _finalize(process: int) -> None:
    """While Python is there: arrays of messages that are not through live until MPI has ended."""
    if os.getpid() != process or "mpi4py.MPI" not in sys.modules:
        return
    from mpi4py import MPI

    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()


def _leave_child() -> None:
    """End a child in which mpi4py would wait for ever. Its own exit status is not known here."""
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
