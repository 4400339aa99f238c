"""Algorithms as data: who sends which chunk to whom, and when. No MPI in here.

`BUILDERS[operation][algorithm](size, root)` gives the schedule. A new algorithm is one short file and a line in this table.
"""

from collections.abc import Callable

from collectives.schedules import ring, tree
from collectives.schedules.schedule import Recv, Schedule, Send, Step

BUILDERS: dict[str, dict[str, Callable[[int, int], Schedule]]] = {
    "all_reduce": {"ring": ring.all_reduce, "tree": tree.all_reduce},
    "all_gather": {"ring": ring.all_gather},
    "reduce_scatter": {"ring": ring.reduce_scatter},
    "broadcast": {"tree": tree.broadcast},
    "reduce": {"tree": tree.reduce},
}


def build(
    operation: str, algorithm: str, size: int, *, root: int = 0, per_node: int = 1, num_segments: int = 1
) -> Schedule:
    return BUILDERS[operation][algorithm](size, root)


__all__ = ["BUILDERS", "Recv", "Schedule", "Send", "Step", "build"]
