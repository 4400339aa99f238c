"""Recursive algorithms: log2 N rounds in which the size of messages doubles, or halves.

An all-gather among N members takes ceil(log2 N) rounds, and each member sends N-1 blocks: both numbers are optimal. Its mirror image
is the reduce-scatter by halving. For powers of two, members exchange in pairs (recursive doubling: Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH", IJHPCA 2005). For other N they form a circulant graph as in Bruck et
al. ("Efficient algorithms for all-to-all communications in multiport message-passing systems", TPDS 1997), with the skips of
Träff ("Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms", arXiv 2410.14234): N, N/2, N/4 .. 1, each rounded up.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import zip_longest
from typing import NamedTuple

from collectives.schedules.schedule import Cost, Recv, Schedule, Send, Setup, Step
from collectives.schedules.tree import depth, gather, scatter


class Area(NamedTuple):
    """A range of chunks that is divided among some ranks: member i owns the `block` chunks from `first` + i * `block` on.

    `closed`: the area is the whole buffer, so that its first chunk follows its last one.
    """

    members: Sequence[int]
    first: int = 0
    block: int = 1
    closed: bool = True

    def span(self, i: int, count: int) -> list[tuple[int, int]]:
        """The blocks of `count` members from `i` on, cyclically, as one or two messages of (first chunk, number of chunks)."""
        p = len(self.members)
        i %= p
        if self.closed or i + count <= p:
            return [(self.first + i * self.block, count * self.block)]
        return [(self.first + i * self.block, (p - i) * self.block), (self.first, (i + count - p) * self.block)]


def skips(p: int) -> Iterator[tuple[int, int]]:
    """For each round of an all-gather on the circulant graph: (blocks that a member has before it, blocks that it receives)."""
    for k in reversed(range(depth(p))):
        held, then = -(-p >> k + 1), -(-p >> k)
        yield held, then - held


def circulant_steps(area: Area, i: int, num_chunks: int) -> tuple[Step, ...]:
    """Member i's steps of an all-gather of the area, for any number of members. Before a round it has blocks i, .. i + held - 1.

    A message that would pass the end of an area that is not closed takes two rounds.
    """
    p, steps = len(area.members), []
    for held, count in skips(p):
        to, source = area.members[(i - held) % p], area.members[(i + held) % p]
        for send, recv in zip_longest(area.span(i, count), area.span(i + held, count)):
            steps.append(
                Step(
                    Send(to, send[0] % num_chunks, send[1]) if send else None,
                    Recv(source, recv[0] % num_chunks, False, recv[1]) if recv else None,
                )
            )
    return tuple(steps)


def _pair_steps(area: Area, i: int, num_chunks: int) -> tuple[Step, ...]:
    """Member i's steps of an all-gather for a power of two: it exchanges all its blocks with i xor 1, i xor 2, i xor 4 .."""
    steps = []
    for k in range(depth(len(area.members))):
        held = 1 << k
        (mine, count), (theirs, _) = (area.span(j & -held, held)[0] for j in (i, i ^ held))
        peer = area.members[i ^ held]
        steps.append(Step(Send(peer, mine % num_chunks, count), Recv(peer, theirs % num_chunks, False, count)))
    return tuple(steps)


def doubling_steps(area: Area, i: int, num_chunks: int) -> tuple[Step, ...]:
    """Member i's steps of an all-gather of the area; mirrored, they are a reduce-scatter by halving."""
    p = len(area.members)
    return (circulant_steps if p & p - 1 else _pair_steps)(area, i, num_chunks)


def doubling_rounds(p: int, closed: bool) -> int:
    """The rounds of `doubling_steps`: log2 p, rounded up; in an area that is not closed, longer messages take two rounds."""
    q = depth(p)
    if closed or p & p - 1 == 0:
        return q
    return 2 * q - 1 - (p <= 3 << q - 2)  # the last two rounds have short messages only: one block


# On all ranks


def _doubling(setup: Setup) -> Schedule:
    """The all-gather from which the algorithms below are made."""
    n = setup.size
    cost = Cost(depth(n), Fraction(n - 1, n))
    period = 1 if n & n - 1 else None  # pairs by xor are not invariant under shifts
    area, name = Area(range(n)), "halving"  # the name of its mirror image
    return Schedule("all_gather", name, n, setup.root, n, lambda rank: doubling_steps(area, rank, n), cost, period)


def bruck_all_gather(setup: Setup) -> Schedule:
    """Rank r begins with chunk r; all ranks end with all chunks. It uses the circulant graph for every N."""
    n = setup.size
    cost = Cost(depth(n), Fraction(n - 1, n))
    return Schedule(
        "all_gather", "bruck", n, setup.root, n, lambda rank: circulant_steps(Area(range(n)), rank, n), cost, period=1
    )


def halving_reduce_scatter(setup: Setup) -> Schedule:
    """Rank r ends with the sum of all ranks' chunk r."""
    return _doubling(setup).mirrored("reduce_scatter", reduce=True)


def halving_doubling_all_reduce(setup: Setup) -> Schedule:
    """A reduce-scatter by halving, then an all-gather by doubling: as few bytes as a ring in 2 log2 N rounds."""
    return halving_reduce_scatter(setup).then(_doubling(setup), "all_reduce", "halving_doubling")


def scatter_all_gather_broadcast(setup: Setup) -> Schedule:
    """All ranks end with the root's buffer: a scatter down a binomial tree, then an all-gather (van de Geijn). For long messages."""
    return scatter(setup).then(_doubling(setup), "broadcast", "scatter_all_gather")


def reduce_scatter_gather_reduce(setup: Setup) -> Schedule:
    """The root ends with the sum of all ranks: a reduce-scatter, then a gather up a binomial tree (Rabenseifner). For long messages."""
    return halving_reduce_scatter(setup).then(gather(setup), "reduce", "reduce_scatter_gather")
