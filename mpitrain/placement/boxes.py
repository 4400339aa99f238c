"""Where a rank's part of a parameter lies in the whole parameter."""

from math import prod
from typing import NamedTuple


class ShardBox(NamedTuple):
    """A rank's part of a parameter: `shape` at `offset` in the full `full_shape`; elements `start`, ... of the flat buffer."""

    full_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return prod(self.shape)
