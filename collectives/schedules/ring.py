"""Ring algorithms: every rank exchanges messages only with its two neighbours; bandwidth-optimal, N-1 rounds in each direction.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009. Each chunk is summed along
one path, so all ranks get the same bits. The latency grows with N: for short messages and many ranks a tree is faster.
"""

from fractions import Fraction

from collectives.schedules.schedule import Cost, Recv, Schedule, Send, Setup, Step


def _all_gather_steps(size: int, rank: int) -> tuple[Step, ...]:
    """Each rank sends its own chunk first, then in each step the chunk that it received last."""
    after, before = (rank + 1) % size, (rank - 1) % size
    return tuple(
        Step(Send(before, (rank + s) % size), Recv(after, (rank + s + 1) % size, reduce=False)) for s in range(size - 1)
    )


def all_gather(setup: Setup) -> Schedule:
    """Rank r begins with chunk r; all end with all chunks."""
    n = setup.size
    cost = Cost(n - 1, Fraction(n - 1, n))
    return Schedule("all_gather", "ring", n, setup.root, n, lambda rank: _all_gather_steps(n, rank), cost, period=1)


def reduce_scatter(setup: Setup) -> Schedule:
    """Rank r ends with the sum of all ranks' chunk r: after step s it holds the sum of s + 2 ranks' chunk r - s - 2."""
    return all_gather(setup).mirrored("reduce_scatter", reduce=True)


def all_reduce(setup: Setup) -> Schedule:
    """A reduce-scatter, then an all-gather of its results."""
    return reduce_scatter(setup).then(all_gather(setup), "all_reduce", "ring")
