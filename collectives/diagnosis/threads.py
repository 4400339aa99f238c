"""Several threads at once on one communicator: an error, since the ranks would come to their collectives in different orders.

MPI matches the collectives of a communicator by their order alone. So do the ranks that meet in the memory of a node. Which of two
threads comes first is chance, on each rank anew: one rank's gradients would be added to another's statistics, or the sizes differ and
the job hangs. Threads that take turns, in an order that the program gives them, are as good as one.
"""

import threading
from typing import TYPE_CHECKING

from collectives.diagnosis import stacks

if TYPE_CHECKING:  # which imports this module
    from collectives.diagnosis.record import Entry

_REMEDY = (
    "expected one thread at a time, because the order of the threads' operations would differ between the ranks: give each thread a "
    "communicator of its own, by comm.split(0) on all ranks before the threads start"
)


def refuse_unless_gone(other: "Entry", mine: "Entry") -> None:
    """RuntimeError: this thread has entered `mine` while another is inside `other`, of the same Log. The Log is lost from then on.

    The order of what was called is not known any more, so each later collective is refused too, of whatever thread: else those that go
    on would wait for ranks on which another thread was refused. Not where the other thread has left `other` by an exception that
    nobody has reported.
    """
    lost = other.thread == _NOBODY
    if not lost and not stacks.inside_package(other.thread):
        other.fail()
        return
    mine.fail()
    said = other.call[0] if lost else f"{other.call[0]}, at {stacks.call_site(other.thread)}"
    log = mine.log
    log.latest = last = type(other)()
    last.log, last.state, last.thread, last.call = log, other.state, _NOBODY, (said, *other.call[1:])
    raise refusal(mine.call[0], str(log), said)


def refusal(operation: str, communicator: str, other: str) -> RuntimeError:
    """The error of a thread that calls `operation` while another one is inside `other`."""
    name = threading.current_thread().name
    return RuntimeError(
        f"{operation} on {communicator}, by thread {name}, while another thread was inside {other}; {_REMEDY}"
    )


_NOBODY = -1  # in the place of a thread: of an operation that never ends
