"""Every part goes directly from the rank that has it to the rank that needs it: the fewest bytes, N-1 rounds.

The pairwise exchange is that of Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
IJHPCA 2005. Bruck's all-to-all in log2 N rounds is not implemented: its messages consist of blocks that are not adjacent in the
buffer.
"""

from fractions import Fraction

from collectives.schedules.schedule import Cost, Recv, Schedule, Send, Setup, Step


def _scatter_steps(setup: Setup, rank: int) -> tuple[Step, ...]:
    n, root = setup.size, setup.root
    if rank != root:
        return (Step(recv=Recv(root, rank, reduce=False)),)
    return tuple(Step(send=Send((root + s) % n, (root + s) % n)) for s in range(1, n))


def _all_to_all_steps(size: int, rank: int) -> tuple[Step, ...]:
    """In step s each rank sends to the s-th rank after it, so that no rank receives two messages at the same time."""
    steps = []
    for s in range(1, size):
        to, source = (rank + s) % size, (rank - s) % size
        steps.append(Step(Send(to, to), Recv(source, size + source, reduce=False)))
    return tuple(steps)


def scatter(setup: Setup) -> Schedule:
    """Rank r ends with the root's chunk r."""
    n = setup.size
    cost = Cost(n - 1, Fraction(n - 1, n))
    return Schedule("scatter", "linear", n, setup.root, n, lambda rank: _scatter_steps(setup, rank), cost)


def gather(setup: Setup) -> Schedule:
    """The root ends with all ranks' chunks."""
    n = setup.size
    return scatter(setup).mirrored("gather", reduce=False, cost=Cost(n - 1, Fraction(min(1, n - 1), n)))


def all_to_all(setup: Setup) -> Schedule:
    """Rank r ends with chunk r of every other rank; schedules/schedule.py defines the numbers of the chunks."""
    n = setup.size
    cost = Cost(n - 1, Fraction(n - 1, n))
    return Schedule(
        "all_to_all", "pairwise", n, setup.root, 2 * n, lambda rank: _all_to_all_steps(n, rank), cost, period=1
    )
