"""Boxes of tensors: exact covers, intersections, and flat ranges.

The module is arithmetic on tuples, without files, arrays or ranks. Shapes and offsets count elements, one entry per
dimension; "flat" positions are row-major (C order).
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, combinations, islice
from math import prod
from typing import NamedTuple

Shape = tuple[int, ...]


class Box(NamedTuple):
    """A rectangle of a tensor: in each dimension `shape` elements from `offset` on."""

    offset: Shape
    shape: Shape

    @classmethod
    def full(cls, shape: Sequence[int]) -> "Box":
        """The box that is a whole tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def size(self) -> int:
        """Number of elements; 1 in zero dimensions."""
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index of the tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))

    def inside(self, shape: Shape) -> bool:
        """Whether the box lies within a tensor of `shape` (and has as many dimensions)."""
        offset, size = self
        if not len(offset) == len(size) == len(shape):
            return False
        for o, n, full in zip(offset, size, shape):  # noqa: B905, SIM110 - `all` takes three times as long
            if o < 0 or n < 0 or o + n > full:
                return False
        return True

    def intersect(self, other: "Box") -> "Box | None":
        """The elements in both boxes, or None if there are none."""
        offset, shape = [], []
        for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True):
            start, stop = max(a, b), min(a + n, b + m)
            if start >= stop:
                return None
            offset.append(start)
            shape.append(stop - start)
        return Box(tuple(offset), tuple(shape))

    def relative_to(self, origin: Shape) -> "Box":
        """The same box counted from `origin`."""
        return Box(tuple(o - b for o, b in zip(self.offset, origin, strict=True)), self.shape)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(self.offset, self.shape, strict=True)) + "]"


def cover_error(shape: Shape, pairs: Sequence[tuple[Shape, Shape]], owner: Callable[[int], str]) -> str | None:
    """A message if boxes are not an exact cover of a tensor of `shape`, or None. Each element must lie in exactly one box.

    `pairs`: the boxes, or the offset and the shape of each. `owner`: from a box's number to its name in the message ("rank 3"). Empty
    boxes are no error.
    """
    if _stacked(shape, pairs):
        return None
    boxes = [Box(*pair) for pair in pairs]
    for i, box in enumerate(boxes):
        if not box.inside(shape):
            return f"{owner(i)}'s box of {box.shape} at {box.offset} does not lie inside the shape {shape}"
    filled = [(box, i) for i, box in enumerate(boxes) if box.size]
    if problem := _overlap(filled, owner):
        return problem
    # Disjoint boxes cover a tensor exactly if the sum of their sizes is its size.
    if sum(box.size for box, _ in filled) == prod(shape):
        return None
    return f"no rank holds element {_first_gap(shape, [box for box, _ in filled])} of the shape {shape}"


def _stacked(shape: Shape, boxes: Sequence[tuple[Shape, Shape]]) -> bool:
    """Whether the boxes are all rows of a tensor of `shape`, in order: the most common cut, which is quick to check."""
    if not shape:
        return False
    row, zeros, at = shape[1:], (0,) * (len(shape) - 1), 0
    for offset, count in boxes:
        if offset != (at, *zeros) or count[1:] != row or not count or count[0] < 0:
            return False
        at += count[0]
    return at == shape[0] and 0 not in shape


def _overlap(filled: list[tuple[Box, int]], owner: Callable[[int], str]) -> str | None:
    """A message about two overlapping boxes of `filled` (boxes with their numbers), or None.

    Planes between the boxes separate them into groups. Only boxes that no plane separates are compared with each other. Hundreds of
    such boxes occur only in an attack, so the number of comparisons is limited.
    """
    budget = 10_000 + sum(10 * (4 + len(box.shape)) for box, _ in filled)
    todo = [filled]
    while todo and budget > 0:
        group = todo.pop()
        for axis in range(len(group[0][0].shape) if len(group) > 1 else 0):
            budget -= len(group)
            parts = _apart(group, axis)
            if len(parts) > 1:
                todo += parts
                break
        else:
            for (box, i), (other, j) in islice(combinations(group, 2), max(0, budget)):
                if box.intersect(other):
                    return f"{owner(i)}'s box {box} and {owner(j)}'s box {other} overlap"
            budget -= len(group) * (len(group) - 1) // 2
    return None if budget > 0 else "its boxes interlock too much to be checked; expected cuts along planes"


def _apart(group: list[tuple[Box, int]], axis: int) -> list[list[tuple[Box, int]]]:
    """`group` cut by all planes across `axis` that pass between its boxes."""
    parts: list[list[tuple[Box, int]]] = []
    end = -1
    for pair in sorted(group, key=lambda pair: pair[0].offset[axis]):
        start, length = pair[0].offset[axis], pair[0].shape[axis]
        if start >= end:
            parts.append([])
        parts[-1].append(pair)
        end = max(end, start + length)
    return parts


def _first_gap(shape: Shape, boxes: Sequence[Box]) -> Shape:
    """The first element (row-major) of a tensor of `shape` that lies in none of `boxes`, which are disjoint and too few."""
    if not shape:
        return ()
    # All rows between two neighbouring edges are alike, so only the rows at the edges are checked. A row has a gap if the boxes hold
    # fewer elements of it than it has.
    held = {0: 0}
    for box in boxes:
        for row, sign in ((box.offset[0], 1), (box.offset[0] + box.shape[0], -1)):
            held[row] = held.get(row, 0) + sign * prod(box.shape[1:])
    total = accumulate(held[row] for row in sorted(held))
    row = next(row for row, size in zip(sorted(held), total, strict=True) if size < prod(shape[1:]))
    across = [Box(b.offset[1:], b.shape[1:]) for b in boxes if b.offset[0] <= row < b.offset[0] + b.shape[0]]
    return (row, *_first_gap(shape[1:], across))


def flat_index(position: Shape, shape: Shape) -> int:
    """The flat position of the element at `position` in a tensor of `shape`."""
    index = 0
    for p, n in zip(position, shape, strict=True):
        index = index * n + p
    return index


def single_run(inner: Box, block_shape: Shape, target_shape: Shape) -> bool:
    """Whether `inner` is one contiguous run both in a block of `block_shape` and in a target of `target_shape`.

    This is so if all dimensions after the first one longer than 1 are whole in both, for example for whole rows.
    """
    longer = False
    for n, block, target in zip(inner.shape, block_shape, target_shape, strict=True):
        if longer and not n == block == target:
            return False
        longer = longer or n > 1
    return True


def pieces(box: Box, size: int) -> Iterator[Box]:
    """A box cut into boxes of at most `size` elements each (at least 1), in flat order.

    Each box has as many rows as fit; a row that is too long is cut further. So a whole tensor is cut into flat ranges.
    """
    if box.size <= size:
        if box.size:
            yield box
        return
    axis = next(d for d, n in enumerate(box.shape) if n > 1)
    step = max(1, size * box.shape[axis] // box.size)
    for start in range(0, box.shape[axis], step):
        yield from pieces(rows(box, axis, start, min(step, box.shape[axis] - start)), size)


def rows(box: Box, axis: int, start: int, count: int) -> Box:
    """The `count` rows of a box along `axis`, from its row `start` on."""
    offset, shape = list(box.offset), list(box.shape)
    offset[axis], shape[axis] = offset[axis] + start, count
    return Box(tuple(offset), tuple(shape))


def rectangles(shape: Shape, start: int, stop: int) -> list[Box]:
    """The flat range `start:stop` of a tensor of `shape`, cut into boxes in flat order: at most 2 ndim - 1 of them."""
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    row = prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        return [_under(first, box) for box in rectangles(shape[1:], head, tail)]
    boxes = [_under(first, box) for box in rectangles(shape[1:], head, row)] if head else []
    whole = first + bool(head)
    if whole < last:
        boxes.append(rows(Box.full(shape), 0, whole, last - whole))
    return boxes + [_under(last, box) for box in rectangles(shape[1:], 0, tail)]


def _under(row: int, box: Box) -> Box:
    return Box((row, *box.offset), (1, *box.shape))
