"""Ring algorithms: every rank talks to its two neighbours only; bandwidth-optimal, N-1 rounds each way.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009. Each chunk is summed along
one path, so that every rank ends with the same bits. Latency grows with N: for short messages and many ranks a tree is better.
"""

from fractions import Fraction

from collectives.schedules.schedule import Cost, Recv, Schedule, Send, Step


def _reduce_scatter_steps(size: int, rank: int) -> tuple[Step, ...]:
    """After step s this rank holds the sum of s + 2 ranks' chunk rank - s - 2; the last one is its own."""
    right, left = (rank + 1) % size, (rank - 1) % size
    return tuple(
        Step(Send(right, (rank - s - 1) % size), Recv(left, (rank - s - 2) % size, reduce=True))
        for s in range(size - 1)
    )


def _all_gather_steps(size: int, rank: int) -> tuple[Step, ...]:
    """Each rank passes on what it received last, beginning with its own chunk."""
    right, left = (rank + 1) % size, (rank - 1) % size
    return tuple(
        Step(Send(right, (rank - s) % size), Recv(left, (rank - s - 1) % size, reduce=False)) for s in range(size - 1)
    )


def reduce_scatter(size: int, root: int = 0) -> Schedule:
    """Rank r ends with the sum of all ranks' chunk r."""
    cost = Cost(size - 1, Fraction(size - 1, size))
    return Schedule("reduce_scatter", "ring", size, root, size, lambda rank: _reduce_scatter_steps(size, rank), cost)


def all_gather(size: int, root: int = 0) -> Schedule:
    """Rank r begins with chunk r; all end with all chunks."""
    cost = Cost(size - 1, Fraction(size - 1, size))
    return Schedule("all_gather", "ring", size, root, size, lambda rank: _all_gather_steps(size, rank), cost)


def all_reduce(size: int, root: int = 0) -> Schedule:
    """A reduce-scatter, then an all-gather of its results."""
    cost = Cost(2 * (size - 1), Fraction(2 * (size - 1), size))
    return Schedule(
        "all_reduce",
        "ring",
        size,
        root,
        size,
        lambda rank: _reduce_scatter_steps(size, rank) + _all_gather_steps(size, rank),
        cost,
    )
