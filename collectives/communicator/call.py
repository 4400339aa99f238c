"""The call of a collective after its arrays are checked."""

from collections.abc import Sequence
from dataclasses import dataclass

from collectives.arrays.buffer import Buffer


@dataclass(slots=True)
class Call:
    """A collective and its arguments, of which all but the arrays' contents are the same on all ranks."""

    operation: str
    arrays: tuple[Buffer, ...]  # the first by whose size the algorithm is chosen
    algorithm: str
    op: str | None = None
    root: int | None = None
    counts: Sequence[int] | None = None
    accumulate: str | None = None
    async_op: bool = False  # whether it is carried out later
