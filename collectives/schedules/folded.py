"""Recursive doubling for any number of ranks: the ranks beyond a power of two send their part to a neighbour, which returns the result.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 2005. With 2^q + e ranks, ranks
2j and 2j + 1 are group j for j < e, and each later rank is a group of one. The first rank of a group is its speaker, which sends and
receives for the group. Groups exchange in pairs, and both groups of a pair add the same two numbers, so all ranks get the same bits.
"""

from fractions import Fraction

from collectives.schedules.schedule import Cost, Recv, Schedule, Send, Setup, Step


def _groups(size: int) -> tuple[int, int]:
    """(q, e): the number of exchanges between groups, and the number of groups of two ranks."""
    q = size.bit_length() - 1
    return q, size - (1 << q)


def _group_of(extra: int, rank: int) -> tuple[int, bool]:
    """(the rank's group, whether it is the group's speaker)."""
    return (rank // 2, rank % 2 == 0) if rank < 2 * extra else (rank - extra, True)


def _speaker(extra: int, group: int) -> int:
    return group + min(group, extra)


def _all_reduce_steps(size: int, rank: int) -> tuple[Step, ...]:
    q, extra = _groups(size)
    group, speaks = _group_of(extra, rank)
    if not speaks:
        return Step(send=Send(rank - 1, 0)), Step(recv=Recv(rank - 1, 0, reduce=False))
    peers = [_speaker(extra, group ^ 1 << k) for k in range(q)]
    steps = tuple(Step(Send(peer, 0), Recv(peer, 0, reduce=True)) for peer in peers)
    if group < extra:
        return Step(recv=Recv(rank + 1, 0, reduce=True)), *steps, Step(send=Send(rank + 1, 0))
    return steps


def _all_gather_steps(size: int, rank: int) -> tuple[Step, ...]:
    q, extra = _groups(size)
    group, speaks = _group_of(extra, rank)
    if not speaks:
        return Step(send=Send(rank - 1, rank)), Step(recv=Recv(rank - 1, (rank + 1) % size, False, size - 1))
    steps = [Step(recv=Recv(rank + 1, rank + 1, reduce=False))] if group < extra else []
    for held in (1 << k for k in range(q)):
        (mine, count), (theirs, other) = (
            (_speaker(extra, first), _speaker(extra, first + held) - _speaker(extra, first))
            for first in (group & -held, (group ^ held) & -held)
        )
        peer = _speaker(extra, group ^ held)
        steps.append(Step(Send(peer, mine, count), Recv(peer, theirs, False, other)))
    if group < extra:
        steps.append(Step(send=Send(rank + 1, (rank + 2) % size, size - 1)))
    return tuple(steps)


def all_reduce(setup: Setup) -> Schedule:
    """Exchanges of whole buffers in log2 N rounds, the minimum (two more if N is not a power of two), for short messages."""
    n = setup.size
    q, extra = _groups(n)
    cost = Cost(q + 2 * (extra > 0), Fraction(q + (extra > 0)))
    return Schedule("all_reduce", "recursive_doubling", n, setup.root, 1, lambda rank: _all_reduce_steps(n, rank), cost)


def all_gather(setup: Setup) -> Schedule:
    """Rank r begins with chunk r; all end with all chunks."""
    n = setup.size
    q, extra = _groups(n)
    # Group 0 always has the most chunks: before round k those of 2^k groups, of which up to e have two ranks.
    chunks = (1 << q) - 1
    if extra:
        j = extra.bit_length()
        chunks += (1 << j) - 1 + (q - j) * extra + n - 1
    cost = Cost(q + 2 * (extra > 0), Fraction(chunks, n))
    return Schedule("all_gather", "recursive_doubling", n, setup.root, n, lambda rank: _all_gather_steps(n, rank), cost)
