"""Binomial trees: log2 N rounds. Whole buffers down the tree are best for short messages; for parts they are near the optimum.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 2005. Ranks are numbered
relative to the root, v = (rank - root) mod N: the parent of v is v without its lowest set bit, and the subtree of v is v, v + 1, ...
up to the next number that has no less zeros at its end; so the parts of a subtree follow each other.
"""

from fractions import Fraction

from collectives.schedules.schedule import Cost, Recv, Schedule, Send, Setup, Step


def depth(size: int) -> int:
    """log2 of `size`, rounded up: the rounds in which one rank's word reaches all."""
    return (size - 1).bit_length()


def _spread(setup: Setup, rank: int, *, parts: bool) -> tuple[Step, ...]:
    """From the root down to all: the one chunk of the whole buffer, or with `parts` to each child its subtree's parts alone."""
    n, root = setup.size, setup.root
    v = (rank - root) % n
    lowest = v & -v if v else 1 << depth(n)

    def message(child: int) -> tuple[int, int]:
        """(chunk, count) of what goes to this child."""
        return ((child + root) % n, min(child & -child, n - child)) if parts else (0, 1)

    steps = []
    if v:
        chunk, count = message(v)
        steps.append(Step(recv=Recv((v - lowest + root) % n, chunk, False, count)))
    bits = [1 << i for i in reversed(range(lowest.bit_length() - 1))]
    # The child with the largest subtree first: it has the longest way to go.
    steps += [Step(send=Send((v + bit + root) % n, *message(v + bit))) for bit in bits if v + bit < n]
    return tuple(steps)


def _largest_subtree(size: int) -> Fraction:
    """What the root's busiest child passes up in a gather, in whole buffers: the topmost subtree may be cut short by N."""
    top = 1 << depth(size) - 1 if size > 1 else 1
    return Fraction(max(size - top, top // 2), size)


def broadcast(setup: Setup) -> Schedule:
    """All ranks end with the root's buffer."""
    n = setup.size
    cost = Cost(depth(n), Fraction(depth(n)))
    return Schedule("broadcast", "tree", n, setup.root, 1, lambda rank: _spread(setup, rank, parts=False), cost)


def reduce(setup: Setup) -> Schedule:
    """The root ends with the sum of all ranks; the others keep partial sums."""
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
