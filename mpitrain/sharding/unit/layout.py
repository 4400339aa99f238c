"""The place of each parameter in a unit's flat buffer, and the cuts of the buffer. Pure arithmetic: no torch, no MPI.

Parameters lie end to end, each aligned. The buffer is cut into N shards as equal as rows allow: a cut falls only between rows of a
parameter's first dimension that is longer than 1, or on request only between parameters. So every rank's part of a parameter is a box
of whole rows, which has the parameter's number of dimensions, and which a checkpoint stores as a rectangle.

[Note: equal shards] NCCL gathers and scatters shards of one length in one operation, other shards in one operation per rank. So the
length of private shards is the shortest one at which every cut falls between rows, and the buffer is padded at its end. Such a length
is near: parameters with long rows come first, and each begins at a multiple of its own row, so any common multiple of all rows will do.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm, prod
from typing import Any, Literal

from mpitrain.placement.parts import ShardBox, row_dim

Cut = Literal["rows", "parameters"]
"""Where a flat buffer may be cut: between rows of parameters, or only between parameters."""

MOST_PADDING = 0.02  # share of the elements; if equal shards need more, shards are only as equal as rows allow
ALIGN = 32  # elements: 64 bytes of bf16, 128 of fp32; neighbouring parameters do not share a cache line


def rows_of(full: Any, box: ShardBox) -> Any:
    """The box of a full tensor (of torch or NumPy), as a view."""
    return full.reshape(box.full_shape)[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]


@dataclass(frozen=True)
class ParameterExtent:
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
class ShardLayout:
    """Parameters of the given shapes in one buffer of `numel` elements; rank r's shard is `bounds[r]`, ..., `bounds[r + 1] - 1`."""

    extents: tuple[ParameterExtent, ...]
    numel: int
    bounds: tuple[int, ...]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Elements of each rank's shard."""
        return tuple(self.bounds[i + 1] - self.bounds[i] for i in range(len(self.bounds) - 1))

    @property
    def gaps(self) -> list[slice]:
        """The elements that belong to no parameter."""
        in_buffer = sorted(self.extents, key=lambda extent: extent.start)
        starts = [*(extent.start for extent in in_buffer), self.numel]
        stops = [0, *(extent.stop for extent in in_buffer)]
        return [slice(stop, start) for stop, start in zip(stops, starts, strict=True) if stop < start]

    def box(self, index: int, rank: int) -> ShardBox:
        """The part of parameter `index` on rank `rank`; 0 rows if the rank has no part.

        A scalar is a vector of one element here, since no scalar can be empty. A parameter without elements is whole on each rank.
        """
        extent = self.extents[index]
        shape = extent.shape or (1,)
        if not extent.numel:
            return ShardBox(shape, (0,) * len(shape), shape, extent.start)
        begin = min(max(self.bounds[rank], extent.start), extent.stop)
        end = max(min(self.bounds[rank + 1], extent.stop), begin)
        first, last = (begin - extent.start) // extent.row, (end - extent.start) // extent.row
        return ShardBox(
            full_shape=shape,
            offset=tuple(first if d == extent.dim else 0 for d in range(len(shape))),
            shape=tuple(last - first if d == extent.dim else n for d, n in enumerate(shape)),
            start=begin,
        )

    def only(self, indices: Sequence[int]) -> "ShardLayout":
        """The layout of a buffer for only these parameters. Each rank has the same boxes of them as in this layout."""
        if len(indices) == len(self.extents):
            return self
        extents: dict[int, ParameterExtent] = {}
        ends, cuts, end = list(self.bounds[1:-1]), [0], 0
        for index in sorted(indices, key=lambda i: self.extents[i].start):
            extent = self.extents[index]
            extents[index] = moved = replace(extent, start=_next_multiple(end, ALIGN))
            while ends and ends[0] < extent.stop:
                cuts.append(moved.start + max(ends.pop(0) - extent.start, 0))
            end = moved.stop
        return ShardLayout(tuple(extents[index] for index in indices), end, (*cuts, *(end for _ in ends), end))


def lay_out(
    shapes: Sequence[tuple[int, ...]], num_ranks: int, *, equal: bool = False, cut: Cut = "rows"
) -> ShardLayout:
    """Lay parameters of these shapes end to end and cut the buffer for `num_ranks` ranks.

    `equal`: into shards of one length, if that takes at most `MOST_PADDING` [Note: equal shards]. `cut`: the buffer is cut between
    rows, or only between parameters: then shards are as equal as parameters allow, and some may be empty.
    """
    if equal and cut == "rows" and shapes and num_ranks > 1 and (layout := _equal(shapes, num_ranks)) is not None:
        return layout
    extents: list[ParameterExtent] = []
    end = 0
    for shape in shapes:
        extents.append(_extent_after(shape, end))
        end = extents[-1].stop
    starts = [extent.start for extent in extents]

    def nearest_cut(ideal: float) -> int:
        index = bisect_right(starts, ideal) - 1
        extent = extents[index]
        if ideal >= extent.stop:  # in the gap before the next parameter
            return extents[index + 1].start if index + 1 < len(extents) else end
        step = extent.row if cut == "rows" else max(extent.numel, 1)
        below = extent.start + int(ideal - extent.start) // step * step
        near = below if ideal - below <= below + step - ideal else below + step
        return near if near < extent.stop or index + 1 == len(extents) else extents[index + 1].start

    cuts = [nearest_cut(end * rank / num_ranks) for rank in range(1, num_ranks)] if extents else [0] * (num_ranks - 1)
    return ShardLayout(tuple(extents), end, (0, *cuts, end))


def _extent_after(shape: Sequence[int], end: int, *, at_row: bool = False) -> ParameterExtent:
    """The extent of a parameter that follows element `end`; `at_row`: it begins at a multiple of its own row."""
    dim = row_dim(shape)
    row = max(prod(shape[dim + 1 :]), 1)
    return ParameterExtent(tuple(shape), _next_multiple(end, lcm(ALIGN, row) if at_row else ALIGN), dim, row)


def _equal(shapes: Sequence[tuple[int, ...]], num_ranks: int) -> ShardLayout | None:
    """The shortest shards of one length [Note: equal shards]; None if they need too much padding."""
    rows = [_extent_after(shape, 0).row for shape in shapes]
    extents: dict[int, ParameterExtent] = {}
    end = 0
    for index in sorted(range(len(shapes)), key=lambda i: -rows[i]):
        extents[index] = _extent_after(shapes[index], end, at_row=True)
        end = extents[index].stop
    in_buffer = list(extents.values())
    most = int(sum(extent.numel for extent in in_buffer) * (1 + MOST_PADDING)) // num_ranks
    count = _next_multiple(-(-end // num_ranks), ALIGN)
    while count <= most:
        for rank in range(1, num_ranks):
            cut = _next_cut(in_buffer, rank * count)
            if cut > rank * count:  # within a row, like all cuts up to the length that reaches the row's end
                count = _next_multiple(-(-cut // rank), ALIGN)
                break
        else:
            bounds = tuple(rank * count for rank in range(num_ranks + 1))
            return ShardLayout(tuple(extents[index] for index in range(len(shapes))), num_ranks * count, bounds)
    return None


def _next_cut(extents: Sequence[ParameterExtent], element: int) -> int:
    """The first element, not before `element`, at which the buffer may be cut. `extents`: in the order of the buffer."""
    extent = extents[bisect_right(extents, element, key=lambda extent: extent.start) - 1]
    return element if element >= extent.stop else extent.start + _next_multiple(element - extent.start, extent.row)


def _next_multiple(number: int, step: int) -> int:
    return -(-number // step) * step
