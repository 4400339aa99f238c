"""What a schedule is: for each rank a list of steps over numbered chunks of one buffer.

A step's send and receive go on at the same time; a rank begins its next step when both have ended. Chunks are numbers here: the
executor (collectives/transports/mpi.py) decides which elements chunk i holds, so that uneven cuts need no other schedule. One message
may carry several chunks that follow each other; after the last chunk comes the first again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple


class Send(NamedTuple):
    """Send `count` chunks from `chunk` on, as they are at the beginning of the step, to rank `peer`."""

    peer: int
    chunk: int
    count: int = 1


class Recv(NamedTuple):
    """Receive `count` chunks from `chunk` on from rank `peer`, to add them to what stands there (`reduce`) or to replace it."""

    peer: int
    chunk: int
    reduce: bool
    count: int = 1


class Step(NamedTuple):
    send: Send | None = None
    recv: Recv | None = None


class Cost(NamedTuple):
    """`rounds`: steps on the longest chain of dependencies. `traffic`: what the busiest rank sends, in whole buffers."""

    rounds: int
    traffic: Fraction


@dataclass(frozen=True)
class Schedule:
    """An algorithm for one operation on `size` ranks.

    `program(rank)` gives the steps of a rank; nothing is laid out for ranks that nobody asks about. `cost` is the formula from the
    literature, which `schedules.check` compares with what the steps really do (chunks of equal size).
    """

    operation: str
    algorithm: str
    size: int
    root: int
    num_chunks: int
    program: Callable[[int], tuple[Step, ...]]
    cost: Cost
