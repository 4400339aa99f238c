"""Binomial trees: log2 N rounds, the whole buffer each time; best for short messages.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 2005. Ranks are numbered
relative to the root, v = (rank - root) mod N: the parent of v is v without its lowest set bit.
"""

from fractions import Fraction

from collectives.schedules.schedule import Cost, Recv, Schedule, Send, Step


def _rounds(size: int) -> int:
    return (size - 1).bit_length()


def _children(size: int, v: int) -> list[int]:
    """Children of v, nearest (smallest subtree) first."""
    lowest = v & -v if v else 1 << _rounds(size)
    bits = [1 << i for i in range(lowest.bit_length() - 1)]
    return [v + bit for bit in bits if v + bit < size]


def _broadcast_steps(size: int, root: int, rank: int) -> tuple[Step, ...]:
    v = (rank - root) % size
    receive = [Step(recv=Recv((v - (v & -v) + root) % size, 0, reduce=False))] if v else []
    # The child with the largest subtree first: it has the longest way to go.
    send = [Step(send=Send((child + root) % size, 0)) for child in reversed(_children(size, v))]
    return tuple(receive + send)


def _reduce_steps(size: int, root: int, rank: int) -> tuple[Step, ...]:
    v = (rank - root) % size
    receive = [Step(recv=Recv((child + root) % size, 0, reduce=True)) for child in _children(size, v)]
    send = [Step(send=Send((v - (v & -v) + root) % size, 0))] if v else []
    return tuple(receive + send)


def broadcast(size: int, root: int = 0) -> Schedule:
    """All ranks end with the root's buffer."""
    cost = Cost(_rounds(size), Fraction(_rounds(size)))
    return Schedule("broadcast", "tree", size, root, 1, lambda rank: _broadcast_steps(size, root, rank), cost)


def reduce(size: int, root: int = 0) -> Schedule:
    """The root ends with the sum of all ranks; the others keep partial sums."""
    cost = Cost(_rounds(size), Fraction(min(1, size - 1)))
    return Schedule("reduce", "tree", size, root, 1, lambda rank: _reduce_steps(size, root, rank), cost)


def all_reduce(size: int, root: int = 0) -> Schedule:
    """A reduce to the root, then a broadcast from it."""
    cost = Cost(2 * _rounds(size), Fraction(_rounds(size)))
    return Schedule(
        "all_reduce",
        "tree",
        size,
        root,
        1,
        lambda rank: _reduce_steps(size, root, rank) + _broadcast_steps(size, root, rank),
        cost,
    )
