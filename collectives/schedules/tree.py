"""Binomial trees: log2 N rounds. For whole buffers a tree is best with short messages; for gather and scatter it is near the optimum.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 2005. Ranks are numbered
relative to the root, v = (rank - root) mod N: the parent of v is v without its lowest set bit, and the subtree of v is v, v + 1, ...
up to the next number that has at least as many trailing zeros. So the parts of a subtree are consecutive.
"""

from fractions import Fraction

from collectives.schedules.schedule import Cost, Recv, Schedule, Send, Setup, Step


def depth(size: int) -> int:
    """log2 of `size`, rounded up: the rounds that a broadcast needs."""
    return (size - 1).bit_length()


def _spread(setup: Setup, rank: int, *, parts: bool) -> tuple[Step, ...]:
    """A rank's steps from the root down the tree: the whole buffer as one chunk, or with `parts` only each subtree's parts."""
    n, root = setup.size, setup.root
    v = (rank - root) % n
    lowest = v & -v if v else 1 << depth(n)

    def message(child: int) -> tuple[int, int]:
        """(chunk, count) of the message to this child."""
        return ((child + root) % n, min(child & -child, n - child)) if parts else (0, 1)

    steps = []
    if v:
        chunk, count = message(v)
        steps.append(Step(recv=Recv((v - lowest + root) % n, chunk, False, count)))
    bits = [1 << i for i in reversed(range(lowest.bit_length() - 1))]
    # The child with the largest subtree comes first, because its subtree is the deepest.
    steps += [Step(send=Send((v + bit + root) % n, *message(v + bit))) for bit in bits if v + bit < n]
    return tuple(steps)


def _largest_subtree(size: int) -> Fraction:
    """The amount that the root's busiest child sends up in a gather, in whole buffers; N may cut off the top subtree."""
    top = 1 << depth(size) - 1 if size > 1 else 1
    return Fraction(max(size - top, top // 2), size)


def broadcast(setup: Setup) -> Schedule:
    """All ranks end with the root's buffer."""
    n = setup.size
    cost = Cost(depth(n), Fraction(depth(n)))
    return Schedule("broadcast", "tree", n, setup.root, 1, lambda rank: _spread(setup, rank, parts=False), cost)


def reduce(setup: Setup) -> Schedule:
    """The root ends with the sum of all ranks; the other ranks keep partial sums."""
    n = setup.size
    return broadcast(setup).mirrored("reduce", reduce=True, cost=Cost(depth(n), Fraction(min(1, n - 1))))


def all_reduce(setup: Setup) -> Schedule:
    """A reduce to the root, then a broadcast from it."""
    rounds = depth(setup.size)
    return reduce(setup).then(broadcast(setup), "all_reduce", "tree", Cost(2 * rounds, Fraction(rounds)))


def scatter(setup: Setup) -> Schedule:
    """Rank r ends with the root's chunk r. On the way a rank holds its subtree's chunks."""
    n = setup.size
    cost = Cost(depth(n), Fraction(n - 1, n))
    return Schedule("scatter", "tree", n, setup.root, n, lambda rank: _spread(setup, rank, parts=True), cost)


def gather(setup: Setup) -> Schedule:
    """The root ends with all ranks' chunks. On the way a rank holds its subtree's chunks."""
    n = setup.size
    return scatter(setup).mirrored("gather", reduce=False, cost=Cost(depth(n), _largest_subtree(n)))
