"""Schedules: for each rank a list of steps over numbered chunks of one buffer.

A step's send and receive go on at the same time; a rank begins its next step when both have ended. Chunks are numbers here: the
executor (transports/executor.py) decides which elements chunk i holds, so that uneven cuts need no other schedule. One message may
carry several chunks that follow each other; after the last chunk comes the first again.

The chunks: in all_gather, reduce_scatter, gather and scatter chunk r is rank r's part, so there are N of them; in all_to_all
chunks 0..N-1 are the parts of the input (chunk p goes to rank p) and N..2N-1 those of the output (chunk N + p is from rank p), where a
rank's own part needs no message and is no matter of the schedule; elsewhere they are any equal cut of the buffer.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple


class Send(NamedTuple):
    """Send `count` chunks from `chunk` on, as they are at the beginning of the step, to rank `peer`."""

    peer: int
    chunk: int
    count: int = 1  # type: ignore[assignment]  # hides tuple.count, which nobody needs here


class Recv(NamedTuple):
    """Receive `count` chunks from `chunk` on from rank `peer`: `reduce` adds them to what stands there, otherwise they take its place.

    Where it reduces, the step's own send may be of the same chunks (two ranks that exchange their sums); they are added when both
    have ended.
    """

    peer: int
    chunk: int
    reduce: bool
    count: int = 1  # type: ignore[assignment]  # hides tuple.count, which nobody needs here


class Step(NamedTuple):
    send: Send | None = None
    recv: Recv | None = None


class Cost(NamedTuple):
    """`rounds`: steps on the longest chain of dependencies. `traffic`: what the busiest rank sends, in whole buffers."""

    rounds: int
    traffic: Fraction


class Setup(NamedTuple):
    """The numbers for which a schedule is made. Ranks are numbered node by node, `per_node` on each.

    `per_node` divides `size`; two-level algorithms alone look at it. `num_segments`: into how many pieces a pipelined algorithm cuts
    what goes down one tree; the others ignore it. `root`: of broadcast, reduce, gather and scatter.
    """

    size: int
    root: int = 0
    per_node: int = 1
    num_segments: int = 1


@dataclass(frozen=True)
class Schedule:
    """An algorithm for one operation on `size` ranks.

    `program(rank)` gives the steps of a rank; the steps of other ranks are not computed. `cost` is the formula from the
    literature, which `schedules.check` compares with what the steps really do (chunks of equal size). `period`: the program of rank
    r + period is that of rank r with each peer `period` further on, modulo size, and messages of as many chunks; None where no
    number below size is known to be one.
    """

    operation: str
    algorithm: str
    size: int
    root: int
    num_chunks: int
    program: Callable[[int], tuple[Step, ...]]
    cost: Cost
    period: int | None = None

    @property
    def chunks_per_buffer(self) -> int:
        """How many chunks the whole buffer is that `cost.traffic` counts in: in all_to_all the input alone."""
        return self.num_chunks // 2 if self.operation == "all_to_all" else self.num_chunks

    def mirrored(self, operation: str, *, reduce: bool, cost: Cost | None = None) -> "Schedule":
        """`operation` as this schedule backwards in time, see `mirrored`. Its cost is the same unless given."""
        program = self.program
        return replace(
            self,
            operation=operation,
            program=lambda rank: mirrored(program(rank), reduce=reduce),
            cost=cost or self.cost,
        )

    def then(self, second: "Schedule", operation: str, algorithm: str, cost: Cost | None = None) -> "Schedule":
        """`operation` as this schedule and `second` one after the other. Its cost is the sum of theirs unless given."""
        return replace(
            self,
            operation=operation,
            algorithm=algorithm,
            program=lambda rank: self.program(rank) + second.program(rank),
            cost=cost or Cost(self.cost.rounds + second.cost.rounds, self.cost.traffic + second.cost.traffic),
            period=self.period if self.period == second.period else None,
        )


def mirrored(steps: tuple[Step, ...], *, reduce: bool) -> tuple[Step, ...]:
    """The steps backwards in time: each send a receive and each receive a send.

    What spreads data from one rank brings it together on that rank: a mirrored broadcast is a reduce, a mirrored all-gather a
    reduce-scatter, and a mirrored scatter (`reduce=False`) a gather. Every chunk is summed along the one tree on which it was spread.
    """
    return tuple(
        Step(
            Send(step.recv.peer, step.recv.chunk, step.recv.count) if step.recv else None,
            Recv(step.send.peer, step.send.chunk, reduce, step.send.count) if step.send else None,
        )
        for step in reversed(steps)
    )
