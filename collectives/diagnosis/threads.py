"""Several threads at once on one communicator: an error, since the ranks would come to their collectives in different orders.

MPI matches the collectives of a communicator by their order alone. So do the ranks that meet in the memory of a node. Which of two
threads comes first is chance, on each rank anew: one rank's gradients would be added to another's statistics, or the sizes differ and
the job hangs. Threads that take turns, in an order that the program gives them, are as good as one.
"""

import threading

_REMEDY = (
    "expected one thread at a time, because the order of the threads' operations would differ between the ranks: give each thread a "
    "communicator of its own, by comm.split(0) on all ranks before the threads start"
)


def refusal(operation: str, communicator: str, other: str) -> RuntimeError:
    """The error of a thread that calls `operation` while another one is inside `other`."""
    name = threading.current_thread().name
    return RuntimeError(
        f"{operation} on {communicator}, by thread {name}, while another thread was inside {other}; {_REMEDY}"
    )
