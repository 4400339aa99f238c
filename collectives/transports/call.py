"""A call of a collective whose arrays are checked."""

from collections.abc import Sequence
from dataclasses import dataclass

from collectives.arrays.buffer import Buffer


@dataclass(slots=True)
class Call:
    """A collective and its arguments. Everything except the contents of the arrays is the same on all ranks."""

    operation: str
    arrays: tuple[Buffer, ...]  # the size of the first one decides the algorithm
    algorithm: str
    op: str | None = None
    root: int | None = None
    counts: Sequence[int] | None = None
    accumulate: str | None = None
    sizes_differ: bool = False  # between the ranks, so that no rank knows those of the others
    async_op: bool = False
    is_encoded: bool = False  # of a call in a group: whether "encoded" carries it out
