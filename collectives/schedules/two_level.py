"""Two-level algorithms: steps within each node, and steps across nodes, in which each rank of a node exchanges one slice.

The traffic across nodes is minimal, and each of a node's g ranks sends 1/g of it: Träff and Hunold, "Decomposing MPI collectives for
exploiting multi-lane communication", CLUSTER 2020. Ranks are numbered node by node: of n nodes, rank a * g + l is the l-th rank of
node a. Both levels use doubling or halving (collectives/schedules/recursive.py).
"""

from fractions import Fraction

from collectives.schedules.recursive import Area, doubling_rounds, doubling_steps, skips
from collectives.schedules.schedule import Cost, Recv, Schedule, Send, Setup, Step
from collectives.schedules.tree import depth


def _all_gather_steps(setup: Setup, rank: int) -> tuple[Step, ...]:
    """A rank's steps. Chunk r is rank r's, so the chunks of a node are consecutive; a message to a node is cut into g slices.

    First the node gathers its own chunks. Then the nodes use the circulant graph: in each round rank l receives the l-th slice of the
    message to its node, and the node gathers the slices. So all ranks of a node always have the same chunks, those of the nodes
    a, a + 1, .. a + held - 1.
    """
    size, g = setup.size, setup.per_node
    n = size // g
    a, l = divmod(rank, g)  # noqa: E741
    node = range(a * g, a * g + g)

    def gather_slices(first: int, block: int) -> tuple[Step, ...]:
        return doubling_steps(Area(node, first, block, closed=g * block == size), l, size)

    steps = gather_slices(a * g, 1)
    for held, count in skips(n):
        to, source = (a - held) % n, (a + held) % n
        send = Send(to * g + l, (a * g + l * count) % size, count)
        recv = Recv(source * g + l, (source * g + l * count) % size, False, count)
        steps += Step(send, recv), *gather_slices(source * g, count)
    return steps


def all_gather(setup: Setup) -> Schedule:
    """Rank r begins with chunk r; all end with all chunks."""
    size, g = setup.size, setup.per_node
    across, within = depth(size // g), doubling_rounds(g, closed=g == size)
    cost = Cost(across + (across + 1) * within, Fraction(size - 1, size))
    period = g if g < size else None  # pairs within a node are the same on every node
    return Schedule(
        "all_gather", "two_level", size, setup.root, size, lambda rank: _all_gather_steps(setup, rank), cost, period
    )


def reduce_scatter(setup: Setup) -> Schedule:
    """Rank r ends with the sum of all ranks' chunk r."""
    return all_gather(setup).mirrored("reduce_scatter", reduce=True)


def all_reduce(setup: Setup) -> Schedule:
    """A reduce-scatter of g slices within each node, an all-reduce of each slice across nodes, an all-gather within each node.

    Chunks do not belong to ranks here: slice l is the n chunks from l * n on, so the rounds within a node are 2 log2 g for any n.
    """
    size, g = setup.size, setup.per_node
    n = size // g

    def program(rank: int) -> tuple[Step, ...]:
        a, l = divmod(rank, g)  # noqa: E741
        within = doubling_steps(Area(range(a * g, a * g + g), 0, n), l, size)
        across = doubling_steps(Area(range(l, size, g), l * n, 1, closed=g == 1), a, size)
        return across + within

    cost = Cost(depth(g) + doubling_rounds(n, closed=g == 1), Fraction(g - 1, g) + Fraction(n - 1, size))
    period = 1 if g == 1 and n & n - 1 else None  # otherwise there are pairs, or only some nodes cut messages in two
    gather = Schedule("all_gather", "two_level", size, setup.root, size, program, cost, period)
    return gather.mirrored("reduce_scatter", reduce=True).then(gather, "all_reduce", "two_level")
