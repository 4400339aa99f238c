"""The choice between a progress thread and none, the same on all ranks."""

import os
from typing import Any

from collectives.environment import switch
from collectives.progress.deferred import Deferred
from collectives.progress.on_thread import Thread
from collectives.progress.progress import Progress


def choose_progress(mpi: Any, threads_allowed: bool, checked: bool) -> Progress:
    """A progress thread if MPITRAIN_PROGRESS_THREAD=1; without that setting, if every rank has two cores or more. Collective.

    In checked mode only if it is 1: progress threads use separate communicators, so a rank that passes async_op and a rank that does
    not would never compare their calls.
    """
    chosen = switch("MPITRAIN_PROGRESS_THREAD")
    # A rank shares its cores with all ranks of the node that are bound to the same set of cores.
    cores = tuple(sorted(os.sched_getaffinity(0)))
    sharing = mpi.allgather((os.uname().nodename, cores, chosen)).count((os.uname().nodename, cores, chosen))
    wanted = not checked and len(cores) >= 2 * sharing if chosen is None else chosen
    return Thread() if all(mpi.allgather(wanted and threads_allowed)) else Deferred()
