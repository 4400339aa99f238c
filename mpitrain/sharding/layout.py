"""Where each parameter lies in a unit's flat buffer, and where the buffer is cut. Pure arithmetic: no torch, no MPI.

Parameters lie end to end, each aligned. The buffer is cut into N shards as equal as rows allow: a cut falls only between rows of a
parameter's first dimension that is longer than 1. So every rank's part of a parameter is a box of whole rows, which keeps its number
of dimensions, and which a checkpoint moves as a rectangle.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

ALIGN = 32  # elements: 64 bytes of bf16, 128 of fp32; kernels and cache lines of neighbouring parameters do not meet


class Box(NamedTuple):
    """A rank's part of a parameter: `shape` at `offset` in the full `full_shape`; elements `start`, ... of the flat buffer."""

    full_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


def rows_of(full: Any, box: Box) -> Any:
    """The box of a full tensor (of torch or NumPy), as a view."""
    return full.reshape(box.full_shape)[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]


@dataclass(frozen=True)
class Place:
    """One parameter in the flat buffer: elements `start`, ..., `start + numel - 1`, in rows of `row` elements along dimension `dim`."""

    shape: tuple[int, ...]
    start: int
    dim: int
    row: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class Layout:
    """Parameters of the given shapes in one buffer of `numel` elements; rank r's shard is `bounds[r]`, ..., `bounds[r + 1] - 1`."""

    places: tuple[Place, ...]
    numel: int
    bounds: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Elements of each rank's shard."""
        return tuple(self.bounds[i + 1] - self.bounds[i] for i in range(len(self.bounds) - 1))

    def box(self, index: int, rank: int) -> Box:
        """Rank `rank`'s part of parameter `index`; 0 rows where it holds nothing of it.

        A scalar is a vector of one element here, since no scalar can be empty.
        """
        place = self.places[index]
        shape = place.shape or (1,)
        begin = min(max(self.bounds[rank], place.start), place.stop)
        end = max(min(self.bounds[rank + 1], place.stop), begin)
        first, last = (begin - place.start) // place.row, (end - place.start) // place.row
        return Box(
            full_shape=shape,
            offset=tuple(first if d == place.dim else 0 for d in range(len(shape))),
            shape=tuple(last - first if d == place.dim else n for d, n in enumerate(shape)),
            start=begin,
        )


def lay_out(shapes: Sequence[tuple[int, ...]], num_ranks: int) -> Layout:
    """Lay parameters of these shapes end to end and cut the buffer for `num_ranks` ranks."""
    places: list[Place] = []
    end = 0
    for shape in shapes:
        dim = next((d for d, length in enumerate(shape) if length > 1), 0)
        row = max(prod(shape[dim + 1 :]), 1)
        places.append(Place(tuple(shape), -(-end // ALIGN) * ALIGN, dim, row))
        end = places[-1].stop
    starts = [place.start for place in places]

    def nearest_cut(ideal: float) -> int:
        index = bisect_right(starts, ideal) - 1
        place = places[index]
        if ideal >= place.stop:  # in the gap before the next parameter
            return places[index + 1].start if index + 1 < len(places) else end
        below = place.start + int(ideal - place.start) // place.row * place.row
        cut = below if ideal - below <= below + place.row - ideal else below + place.row
        return cut if cut < place.stop or index + 1 == len(places) else places[index + 1].start

    cuts = [nearest_cut(end * rank / num_ranks) for rank in range(1, num_ranks)] if places else [0] * (num_ranks - 1)
    return Layout(tuple(places), end, (0, *cuts, end))
