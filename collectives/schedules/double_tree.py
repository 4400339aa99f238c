"""Two pipelined binary trees at the same time: the bandwidth of a ring with the latency of a tree, for long messages and many ranks.

Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 2009. Half of the
buffer goes down each tree in `num_segments` pieces. A rank has children in at most one of the trees, so that ranks send equal amounts.
The edges have two colours: edges of one colour are used in even rounds, the others in odd rounds. No rank sends, or receives, on two
edges of the same colour, so in each round a rank sends at most one message and receives at most one.

Ranks are numbered relative to the root, v = (rank - root) mod N. The root feeds both trees, which are in-order trees of the ranks
1..N-1. In the first tree odd numbers are leaves. The second tree is the mirror image of the first (N odd) or the first shifted by one
(N even), so that odd numbers have children there.
"""

import functools
from fractions import Fraction
from typing import NamedTuple

from collectives.schedules.schedule import Cost, Recv, Schedule, Send, Setup, Step


class _Edge(NamedTuple):
    """An edge from a parent down to a child in a tree. `at`: the round of its first message; the others follow every second round."""

    parent: int
    child: int
    tree: int
    at: int


def _parents(size: int) -> list[list[int]]:
    """parents[tree][v]; the value for v = 0, the root, has no meaning."""
    p = size - 1
    first = [0] * size
    # In-order tree: the top of the ranks low..high is the number with the most trailing zeros.
    ranges = [(1, p, 0)]
    while ranges:
        low, high, parent = ranges.pop()
        if low <= high:
            top = low - 1 + (1 << (high - low + 1).bit_length() - 1)
            first[top] = parent
            ranges += [(low, top - 1, top), (top + 1, high, top)]
    second = [0] * size
    for v in range(1, size):
        # v has the place in the second tree that w has in the first.
        w = p + 1 - v if p % 2 == 0 else v % p + 1
        above = first[w]
        second[v] = 0 if not above else p + 1 - above if p % 2 == 0 else (above - 2) % p + 1
    return [first, second]


@functools.lru_cache(maxsize=16)
def _edges(size: int) -> tuple[list[list[_Edge]], list[list[_Edge]]]:
    """(the edges from each v to its children, the edges to each v from its parents)."""
    parents = _parents(size)
    down: list[list[tuple[int, int]]] = [[] for _ in range(size)]
    for tree in (0, 1):
        for v in range(1, size):
            down[parents[tree][v]].append((tree, v))
    # The edges of one sender, and those of one receiver, must have different colours. Edges with this relation form paths and even
    # cycles: walk along each of them. An edge is (tree, child).
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
    waiting = [(edge, -1) for edge in down[0]]  # an edge, and the round in which its parent has the first piece
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
    """A rank's steps down both trees: chunks 0 .. k-1 in the first tree, k .. 2k-1 in the second."""
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
    """Rounds down the trees: up to two for each of the h edges of the longest path, and two for each further piece."""
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
    """The root ends with the sum of all ranks; the other ranks keep partial sums."""
    return broadcast(setup).mirrored("reduce", reduce=True)


def all_reduce(setup: Setup) -> Schedule:
    """A reduce up both trees, then a broadcast down. A rank with two children in a tree sends two buffers in all, as in a ring."""
    n = setup.size
    traffic = 1 + Fraction(min(n - 2, 2), 2) if n > 1 else Fraction(0)
    return reduce(setup).then(broadcast(setup), "all_reduce", "double_tree", Cost(2 * _rounds(setup), traffic))
