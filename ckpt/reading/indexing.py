"""The part of a tensor that an index such as `entry[2:, ::3, -1]` selects, by NumPy's rules. Arithmetic on tuples, without files."""

import operator
from collections.abc import Iterator
from math import prod
from types import EllipsisType
from typing import Any, NamedTuple, SupportsIndex

from ckpt.format.boxes import Box, Shape, rows

Index = SupportsIndex | slice | EllipsisType


class Selection(NamedTuple):
    """In each dimension `counts` elements from `start` on, `steps` apart. `shape`: without the dimensions that integers drop."""

    start: Shape
    steps: tuple[int, ...]
    counts: Shape
    shape: Shape

    @property
    def is_box(self) -> bool:
        """Whether the selected elements are all elements of a rectangle, in its order."""
        return all(step == 1 for step in self.steps)

    def covering(self, part: Box) -> Box:
        """The smallest box of the tensor with all elements of `part`, a box of the selection. `strides` selects them in it."""
        offset, shape = [], []
        for start, step, first, count in zip(self.start, self.steps, part.offset, part.shape, strict=True):
            reach = (count - 1) * step
            offset.append(start + first * step + min(0, reach))
            shape.append(abs(reach) + 1 if count else 0)
        return Box(tuple(offset), tuple(shape))

    @property
    def strides(self) -> tuple[slice, ...]:
        return tuple(slice(None, None, step) for step in self.steps)

    def parts(self, limit: int) -> Iterator[Box]:
        """Boxes of the selection, end to end. The covering box of each has at most `limit` elements, unless the part is one element."""
        todo = [Box.full(self.counts)] if prod(self.counts) else []
        while todo:
            part = todo.pop()
            if part.size == 1 or self.covering(part).size <= limit:
                yield part
                continue
            axis = next(d for d, n in enumerate(part.shape) if n > 1)
            half = part.shape[axis] // 2
            todo += [rows(part, axis, half, part.shape[axis] - half), rows(part, axis, 0, half)]


def select(where: Box | Index | tuple[Index, ...], shape: Shape) -> Selection:
    """The selection by `where` in a tensor of `shape`. IndexError if it does not fit, TypeError unless integers, slices or `...`."""
    if isinstance(where, Box):
        if not where.inside(shape):
            raise IndexError(f"the box {where} does not lie inside the shape {shape}")
        return Selection(where.offset, (1,) * len(shape), where.shape, where.shape)
    parts: list[Any] = list(where) if isinstance(where, tuple) else [where]
    ellipses = [at for at, part in enumerate(parts) if part is Ellipsis]
    if len(ellipses) > 1:
        raise IndexError("an index can have only one '...'")
    if len(parts) - len(ellipses) > len(shape):
        raise IndexError(f"{len(parts) - len(ellipses)} indices for a tensor of shape {shape}")
    at = ellipses[0] if ellipses else len(parts)
    parts[at : at + 1] = [slice(None)] * (len(shape) - len(parts) + len(ellipses))
    ranges = [_range_of(part, n) for part, n in zip(parts, shape, strict=True)]
    return Selection(
        tuple(found.start if found else 0 for found in ranges),
        tuple(found.step for found in ranges),
        tuple(map(len, ranges)),
        tuple(len(found) for found, part in zip(ranges, parts, strict=True) if isinstance(part, slice)),
    )


def _range_of(part: Any, n: int) -> range:
    """The positions that one part of an index selects in a dimension of `n`."""
    if isinstance(part, slice):
        return range(*part.indices(n))
    try:
        if type(part).__name__ in ("bool", "bool_"):  # an integer for Python; a mask for NumPy
            raise TypeError
        i = operator.index(part)
    except TypeError:
        raise TypeError(
            f"an index has a {type(part).__name__}; expected integers, slices and one '...': "
            "for more read the tensor, or a part of it, with [...] and index the array"
        ) from None
    if not -n <= i < n:
        raise IndexError(f"index {i} is out of range for a dimension of {n}")
    return range(i % n, i % n + 1)
