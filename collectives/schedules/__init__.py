"""Algorithms as data: for each rank the chunks that it sends and receives, in order. This package does not use MPI.

`build(operation, algorithm, size)` returns the schedule. A new algorithm is one short file and a line in `BUILDERS`.
"""

from collections.abc import Callable

from collectives.schedules import direct, double_tree, folded, recursive, ring, tree, two_level
from collectives.schedules.schedule import Cost, Recv, Schedule, Send, Setup, Step

BUILDERS: dict[str, dict[str, Callable[[Setup], Schedule]]] = {
    "all_reduce": {
        "ring": ring.all_reduce,
        "tree": tree.all_reduce,
        "recursive_doubling": folded.all_reduce,
        "halving_doubling": recursive.halving_doubling_all_reduce,
        "double_tree": double_tree.all_reduce,
        "two_level": two_level.all_reduce,
    },
    "all_gather": {
        "ring": ring.all_gather,
        "recursive_doubling": folded.all_gather,
        "bruck": recursive.bruck_all_gather,
        "two_level": two_level.all_gather,
    },
    "reduce_scatter": {
        "ring": ring.reduce_scatter,
        "halving": recursive.halving_reduce_scatter,
        "two_level": two_level.reduce_scatter,
    },
    "broadcast": {
        "tree": tree.broadcast,
        "scatter_all_gather": recursive.scatter_all_gather_broadcast,
        "double_tree": double_tree.broadcast,
    },
    "reduce": {
        "tree": tree.reduce,
        "reduce_scatter_gather": recursive.reduce_scatter_gather_reduce,
        "double_tree": double_tree.reduce,
    },
    "gather": {"tree": tree.gather, "linear": direct.gather},
    "scatter": {"tree": tree.scatter, "linear": direct.scatter},
    "all_to_all": {"pairwise": direct.all_to_all},
}

# Operations with a root; algorithms that use num_segments; algorithms that use per_node.
ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
PIPELINED = frozenset({"double_tree"})
TWO_LEVEL = frozenset({"two_level"})
_IN_ROUNDS = frozenset({"ring", "halving", "halving_doubling", "bruck"})


def build(
    operation: str, algorithm: str, size: int, *, root: int = 0, per_node: int = 1, num_segments: int = 1
) -> Schedule:
    """The schedule of an algorithm for `size` ranks, numbered node by node.

    `per_node` (ranks on a node, divides `size`) is for two-level algorithms, `num_segments` (pieces for each tree) for pipelined ones.
    ValueError if the operation or algorithm is unknown or a number does not fit.
    """
    algorithms = BUILDERS.get(operation)
    if algorithms is None:
        raise ValueError(f"operation {operation!r} is unknown; expected one of {', '.join(BUILDERS)}")
    if algorithm not in algorithms:
        raise ValueError(f"{operation}: algorithm {algorithm!r} is unknown; expected one of {', '.join(algorithms)}")
    if size < 1 or not 0 <= root < size:
        raise ValueError(
            f"{operation}: {size} ranks with root {root}; expected at least one rank, and a root among them"
        )
    if per_node < 1 or (algorithm in TWO_LEVEL and size % per_node):
        raise ValueError(f"{operation}: {per_node} ranks a node; expected a divisor of the {size} ranks")
    if num_segments < 1:
        raise ValueError(f"{operation}: {num_segments} segments; expected at least 1")
    return algorithms[algorithm](Setup(size, root, per_node, num_segments))


def goes_in_rounds(algorithm: str, size: int) -> bool:
    """Whether all ranks have the same number of steps, and a message sent in a rank's k-th step is received in its peer's k-th step.

    Then several schedules on different chunks may run step by step in turn without a deadlock.
    """
    return algorithm in _IN_ROUNDS or (algorithm == "recursive_doubling" and size & (size - 1) == 0)


__all__ = [
    "BUILDERS",
    "PIPELINED",
    "ROOTED",
    "TWO_LEVEL",
    "Cost",
    "Recv",
    "Schedule",
    "Send",
    "Setup",
    "Step",
    "build",
    "goes_in_rounds",
]
