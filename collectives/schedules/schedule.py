"""Schedules: for each rank a list of steps over numbered chunks of one buffer.

A step's send and receive run at the same time; a rank begins its next step when both have ended. Chunks are only numbers here: the
executor (transports/executor.py) decides which elements are in chunk i, so parts may have different sizes. One message may have several
consecutive chunks; the first chunk follows the last one.

In all_gather, reduce_scatter, gather and scatter chunk r is rank r's part, so there are N chunks. In all_to_all chunks 0..N-1 are the
parts of the input (chunk p goes to rank p) and chunks N..2N-1 those of the output (chunk N + p comes from rank p); a rank's own part
needs no message and is not in the schedule. In other operations chunks are equal parts of the buffer.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple


class Send(NamedTuple):
    """Send `count` chunks from `chunk` on to rank `peer`, with their contents at the beginning of the step."""

    peer: int
    chunk: int
    count: int = 1  # type: ignore[assignment]  # hides tuple.count, which is not needed


class Recv(NamedTuple):
    """Receive `count` chunks from `chunk` on from rank `peer`. With `reduce` they are added to the own chunks, else they replace them.

    With `reduce` the step may also send the same chunks (two ranks that exchange their sums); the addition comes after the send.
    """

    peer: int
    chunk: int
    reduce: bool
    count: int = 1  # type: ignore[assignment]  # hides tuple.count, which is not needed


class Step(NamedTuple):
    send: Send | None = None
    recv: Recv | None = None


class Cost(NamedTuple):
    """`rounds`: steps on the longest chain of dependencies. `traffic`: the amount that the busiest rank sends, in whole buffers."""

    rounds: int
    traffic: Fraction


class Setup(NamedTuple):
    """The numbers for which a schedule is made. Ranks are numbered node by node, `per_node` on each.

    `per_node` divides `size`; only two-level algorithms use it. `num_segments`: the number of pieces into which a pipelined algorithm
    cuts the data of one tree; the others ignore it. `root`: of broadcast, reduce, gather and scatter.
    """

    size: int
    root: int = 0
    per_node: int = 1
    num_segments: int = 1


@dataclass(frozen=True)
class Schedule:
    """An algorithm for one operation on `size` ranks.

    `program(rank)` computes the steps of one rank. `cost` is the formula from the literature, which `schedules.check` compares with the
    steps (for chunks of equal size). `period`: the program of rank r + period is that of rank r with `period` added to each peer,
    modulo size, and with messages of the same sizes; None if no period below `size` is known.
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
        """The number of chunks in the whole buffer, the unit of `cost.traffic`: in all_to_all only those of the input."""
        return self.num_chunks // 2 if self.operation == "all_to_all" else self.num_chunks

    def mirrored(self, operation: str, *, reduce: bool, cost: Cost | None = None) -> "Schedule":
        """The schedule of `operation` that runs this schedule backwards, see the function `mirrored`. `cost`: by default the same."""
        program = self.program
        return replace(
            self,
            operation=operation,
            program=lambda rank: mirrored(program(rank), reduce=reduce),
            cost=cost or self.cost,
        )

    def then(self, second: "Schedule", operation: str, algorithm: str, cost: Cost | None = None) -> "Schedule":
        """The schedule of `operation` that runs this schedule and then `second`. `cost`: by default the sum of their costs."""
        return replace(
            self,
            operation=operation,
            algorithm=algorithm,
            program=lambda rank: self.program(rank) + second.program(rank),
            cost=cost or Cost(self.cost.rounds + second.cost.rounds, self.cost.traffic + second.cost.traffic),
            period=self.period if self.period == second.period else None,
        )


def mirrored(steps: tuple[Step, ...], *, reduce: bool) -> tuple[Step, ...]:
    """The steps in reverse order, with each send replaced by a receive and each receive by a send.

    A schedule that spreads data from a rank then collects data on that rank: a mirrored broadcast is a reduce, a mirrored all-gather a
    reduce-scatter, a mirrored scatter (`reduce=False`) a gather. Every chunk is summed along the same tree on which it was spread.
    """
    return tuple(
        Step(
            Send(step.recv.peer, step.recv.chunk, step.recv.count) if step.recv else None,
            Recv(step.send.peer, step.send.chunk, reduce, step.send.count) if step.send else None,
        )
        for step in reversed(steps)
    )
