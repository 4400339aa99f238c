"""The error for several threads at the same time on one communicator, whose order of collectives would differ between the ranks.

MPI and the collectives in node memory match the collectives of a communicator only by their order. Without synchronization the order of
two threads is random on each rank: one rank's gradients would be added to another rank's statistics, or the sizes differ and the job
hangs. Several threads may use a communicator if the program gives them the same order on all ranks.
"""

import threading

_REMEDY = (
    "expected one thread at a time, because the order of the threads' operations would differ between the ranks: give each thread a "
    "communicator of its own, by comm.split(0) on all ranks before the threads start"
)


def refusal(operation: str, communicator: str, other: str) -> RuntimeError:
    """The error for a thread that calls `operation` while another thread is inside `other`."""
    name = threading.current_thread().name
    return RuntimeError(
        f"{operation} on {communicator}, by thread {name}, while another thread was inside {other}; {_REMEDY}"
    )
