"""Boxes of tensors: their cover, and which part of one another needs.

Everything here is arithmetic on tuples: no files, no arrays, no ranks. Shapes and offsets count elements, one entry per
dimension; "flat" positions are row-major (C order).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of a tensor: `shape` elements from `offset` on, in each dimension."""

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
        return len(self.offset) == len(self.shape) == len(shape) and all(
            o >= 0 and n >= 0 and o + n <= full for o, n, full in zip(self.offset, self.shape, shape, strict=True)
        )

    def intersect(self, other: "Box") -> "Box | None":
        """The elements in both boxes, or None if there are none."""
        start = tuple(map(max, self.offset, other.offset))
        stop = tuple(
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(b - a for a, b in zip(start, stop, strict=True))
        return None if any(n <= 0 for n in shape) else Box(start, shape)

    def relative_to(self, origin: Shape) -> "Box":
        """The same box counted from `origin`."""
        return Box(tuple(o - b for o, b in zip(self.offset, origin, strict=True)), self.shape)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(self.offset, self.shape, strict=True)) + "]"


def cover_error(shape: Shape, boxes: Sequence[Box], owners: Sequence[str]) -> str | None:
    """What is wrong with `boxes` as an exact cover of a tensor of `shape`, or None: each element must lie in exactly one box.

    `owners` names each box for the message ("rank 3"). Empty boxes cover nothing and disturb nobody.
    """
    for box, owner in zip(boxes, owners, strict=True):
        if not box.inside(shape):
            return f"{owner}'s box {box} does not lie inside the shape {shape}"
    filled = [(box, owner) for box, owner in zip(boxes, owners, strict=True) if box.size]
    # Sweep along the dimension with the most distinct starts: there the fewest boxes are open at the same time.
    axis = max(range(len(shape)), key=lambda d: len({box.offset[d] for box, _ in filled}), default=None)
    if axis is not None:
        filled.sort(key=lambda pair: pair[0].offset[axis])
    open_boxes: list[tuple[Box, str]] = []
    for box, owner in filled:
        if axis is not None:
            open_boxes = [pair for pair in open_boxes if pair[0].offset[axis] + pair[0].shape[axis] > box.offset[axis]]
        for other, other_owner in open_boxes:
            if box.intersect(other):
                return f"{other_owner}'s box {other} and {owner}'s box {box} overlap"
        open_boxes.append((box, owner))
    # Disjoint boxes cover a tensor exactly if their sizes add up to it.
    if sum(box.size for box, _ in filled) == prod(shape):
        return None
    return f"no rank holds element {_first_gap(shape, [box for box, _ in filled])} of the shape {shape}"


def _first_gap(shape: Shape, boxes: Sequence[Box]) -> Shape | None:
    """The first element (row-major) of a tensor of `shape` that lies in none of `boxes`."""
    if not shape:
        return None if boxes else ()
    # Between two neighbouring edges every row looks the same, so the rows at the edges are all there is to see.
    edges = {0} | {box.offset[0] for box in boxes} | {box.offset[0] + box.shape[0] for box in boxes}
    for row in sorted(edge for edge in edges if edge < shape[0]):
        across = [Box(b.offset[1:], b.shape[1:]) for b in boxes if b.offset[0] <= row < b.offset[0] + b.shape[0]]
        gap = _first_gap(shape[1:], across)
        if gap is not None:
            return (row, *gap)
    return None


def flat_index(position: Shape, shape: Shape) -> int:
    """The flat position of the element at `position` in a tensor of `shape`."""
    index = 0
    for p, n in zip(position, shape, strict=True):
        index = index * n + p
    return index


def single_run(inner: Box, block_shape: Shape, target_shape: Shape) -> bool:
    """Whether `inner` is one contiguous run both in a block of `block_shape` and in a target of `target_shape`.

    It is, as soon as all dimensions behind the first one longer than 1 are whole in both: whole rows, in particular.
    """
    longer = False
    for n, block, target in zip(inner.shape, block_shape, target_shape, strict=True):
        if longer and not n == block == target:
            return False
        longer = longer or n > 1
    return True


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
        boxes.append(Box((whole,) + (0,) * (len(shape) - 1), (last - whole, *shape[1:])))
    return boxes + [_under(last, box) for box in rectangles(shape[1:], 0, tail)]


def slabs(shape: Shape, limit: int) -> Iterator[Box]:
    """A tensor of `shape` cut into boxes of at most `limit` elements (at least 1), in flat order; each is one flat range.

    As many rows together as fit; a row that alone is too long is cut in turn.
    """
    if not prod(shape):
        return
    if prod(shape) <= limit:
        yield Box.full(shape)
        return
    row = prod(shape[1:])
    step = limit // row
    for first in range(0, shape[0], max(1, step)):
        if step:
            yield Box((first,) + (0,) * (len(shape) - 1), (min(step, shape[0] - first), *shape[1:]))
        else:
            yield from (_under(first, box) for box in slabs(shape[1:], limit))


def _under(row: int, box: Box) -> Box:
    return Box((row, *box.offset), (1, *box.shape))
