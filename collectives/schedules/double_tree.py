"""Two binary trees at once, pipelined: the bandwidth of a ring with the latency of a tree, for long messages and many ranks.

Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 2009. Half of the
buffer goes down each tree in `num_segments` pieces. A rank has children in at most one of the trees, so that all ranks send alike.
The edges have two colours: those of one colour are used in even rounds, the others in odd rounds. No rank sends on two edges of the
same colour, and none receives on two: in each round it sends at most one message and receives at most one.

Ranks are numbered relative to the root, v = (rank - root) mod N. The root feeds both trees, which are in-order trees of the ranks
1..N-1: in the first, odd numbers are leaves. The second is the first in a mirror (N odd) or shifted by one (N even): odd numbers have
the children there.
"""

import functools
from fractions import Fraction
from typing import NamedTuple

from collectives.schedules.schedule import Cost, Recv, Schedule, Send, Setup, Step


class _Edge(NamedTuple):
    """From the parent of `child` in a tree down to it. `at`: the round of its first message; the next follow every second round."""

    parent: int
    child: int
    tree: int
    at: int


def _parents(size: int) -> list[list[int]]:
    """parents[tree][v]; for v = 0, the root of all, it means nothing."""
    p = size - 1
    first = [0] * size
    # In-order: the top of the ranks low..high is the one with the most zeros at its end.
    ranges = [(1, p, 0)]
    while ranges:
        low, high, parent = ranges.pop()
        if low <= high:
            top = low - 1 + (1 << (high - low + 1).bit_length() - 1)
            first[top] = parent
            ranges += [(low, top - 1, top), (top + 1, high, top)]
    second = [0] * size
    for v in range(1, size):
        # v stands in the second tree where w stands in the first.
        w = p + 1 - v if p % 2 == 0 else v % p + 1
        above = first[w]
        second[v] = 0 if not above else p + 1 - above if p % 2 == 0 else (above - 2) % p + 1
    return [first, second]


@functools.lru_cache(maxsize=16)
def _edges(size: int) -> tuple[list[list[_Edge]], list[list[_Edge]]]:
    """(the edges down from each v, those into each v)."""
    parents = _parents(size)
    down: list[list[tuple[int, int]]] = [[] for _ in range(size)]
    for tree in (0, 1):
        for v in range(1, size):
            down[parents[tree][v]].append((tree, v))
    # Edges that may not have the same colour, those of one sender and those of one receiver, make paths and even cycles: walk along
    # each. An edge is (tree, child).
    colour: dict[tuple[int, int], int] = {}
    starts = down[0] + [(tree, v) for tree in (0, 1) for v in range(1, size)]
    for start in starts:
        walk = [(start, 0)]
        while walk:
            here, shade = walk.pop()
            if here in colour:
                continue
            colour[here] = shade
            tree, v = here
            others = [(1 - tree, v), *(sibling for sibling in down[parents[tree][v]] if sibling != here)]
            walk += [(other, 1 - shade) for other in others]
    out: list[list[_Edge]] = [[] for _ in range(size)]
    into: list[list[_Edge]] = [[] for _ in range(size)]
    waiting = [(edge, -1) for edge in down[0]]  # with the round in which its parent has the first piece
    while waiting:
        (tree, v), ready = waiting.pop()
        at = ready + 1
        at += (at - colour[tree, v]) % 2
        edge = _Edge(parents[tree][v], v, tree, at)
        out[edge.parent].append(edge)
        into[v].append(edge)
        waiting += [(below, at) for below in down[v] if below[0] == tree]
    return out, into


def _spread(setup: Setup, rank: int) -> tuple[Step, ...]:
    """Down both trees: chunks 0 .. k-1 in the first, k .. 2k-1 in the second."""
    n, root, k = setup.size, setup.root, setup.num_segments
    if n == 1:
        return ()
    out, into = _edges(n)
    v = (rank - root) % n
    sends = {edge.at + 2 * i: Send((edge.child + root) % n, edge.tree * k + i) for edge in out[v] for i in range(k)}
    receives = {
        edge.at + 2 * i: Recv((edge.parent + root) % n, edge.tree * k + i, reduce=False)
        for edge in into[v]
        for i in range(k)
    }
    return tuple(Step(sends.get(at), receives.get(at)) for at in sorted(sends.keys() | receives.keys()))


def _rounds(setup: Setup) -> int:
    """Of one way. The first piece needs up to two rounds for each of the h edges on the longest way down; then comes one every two."""
    n = setup.size
    if n == 1:
        return 0
    h = (n - 1).bit_length()
    fill = 2 * h if n % 4 == 3 or n & n - 1 == 0 else 2 * h - 1
    return fill + 2 * (setup.num_segments - 1)


def broadcast(setup: Setup) -> Schedule:
    """All ranks end with the root's buffer."""
    n = setup.size
    cost = Cost(_rounds(setup), Fraction(min(1, n - 1)))
    return Schedule(
        "broadcast", "double_tree", n, setup.root, 2 * setup.num_segments, lambda rank: _spread(setup, rank), cost
    )


def reduce(setup: Setup) -> Schedule:
    """The root ends with the sum of all ranks; the others keep partial sums."""
    return broadcast(setup).mirrored("reduce", reduce=True)


def all_reduce(setup: Setup) -> Schedule:
    """A reduce up both trees, then a broadcast down. A rank that has two children somewhere sends the buffer twice, as in a ring."""
    n = setup.size
    traffic = 1 + Fraction(min(n - 2, 2), 2) if n > 1 else Fraction(0)
    return reduce(setup).then(broadcast(setup), "all_reduce", "double_tree", Cost(2 * _rounds(setup), traffic))
