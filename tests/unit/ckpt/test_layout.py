"""Boxes, covers, packing and the parts of blocks: pure arithmetic, compared with what NumPy does on small arrays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from some_boxes import boxes_in, partitions, shapes

from ckpt.format.boxes import Box, cover_error, flat_index, pieces, rectangles, single_run


def count(shape, boxes):
    """How many boxes hold each element."""
    counts = np.zeros(shape, int)
    for box in boxes:
        counts[box.slices] += 1
    return counts


def problem(shape, boxes):
    return cover_error(shape, boxes, lambda i: f"rank {i}")


@pytest.mark.rest
@given(st.data(), shapes)
def test_intersection_is_what_both_hold(data, shape):
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    both = count(shape, [a, b]) == 2
    inner = a.intersect(b)
    assert inner == b.intersect(a)
    assert np.array_equal(count(shape, [inner] if inner else []) == 1, both)


@given(st.data(), shapes)
def test_exact_covers_are_accepted(data, shape):
    boxes = data.draw(partitions(shape))
    empty = Box((0,) * len(shape), (0, *shape[1:])) if shape else None
    assert problem(shape, [*boxes, *([empty] if empty else [])]) is None


@given(st.data(), shapes)
def test_cover_error_agrees_with_counting(data, shape):
    boxes = data.draw(st.lists(boxes_in(shape), max_size=5))
    counts = count(shape, boxes)
    found = problem(shape, boxes)
    assert (found is None) == bool((counts == 1).all())
    if found and "no rank holds" in found:
        # the first gap in flat order
        gap = np.argwhere(np.atleast_1d(counts) == 0)[0] if shape else ()
        assert f"element ({', '.join(map(str, gap))}" in found
    elif found:
        assert "overlap" in found and (counts > 1).any()


def test_cover_errors_name_the_ranks():
    assert "rank 0's box [0:2, 0:3] and rank 1's box [1:4, 0:3] overlap" in problem(
        (4, 3), [Box((0, 0), (2, 3)), Box((1, 0), (3, 3))]
    )
    assert "no rank holds element (2, 1)" in problem((4, 3), [Box((0, 0), (2, 3)), Box((2, 0), (2, 1))])
    assert "does not lie inside" in problem((4,), [Box((2,), (3,))])
    assert problem((0, 4), []) is None
    assert "no rank holds element ()" in problem((), [])


@given(st.data(), shapes, st.integers(1, 40))
def test_pieces_cover_a_box_in_order(data, shape, size):
    offset = tuple(data.draw(st.integers(0, 5)) for _ in shape)
    found = list(pieces(Box(offset, shape), size))
    assert all(0 < piece.size <= size for piece in found)
    flat = [flat_index(piece.relative_to(offset).offset, shape) for piece in found]
    assert flat == sorted(flat) and sum(piece.size for piece in found) == np.prod(shape)


def test_cover_of_many_columns_is_fast():
    n = 3000
    assert problem((4, n), [Box((0, i), (4, 1)) for i in range(n)]) is None


@pytest.mark.rest
@pytest.mark.parametrize(("shape", "side"), [((200, 200), 1), ((30, 30, 30), 1), ((60_000, 4), 4)])
def test_cover_of_a_grid_is_fast(shape, side):
    counts = (*shape[:-1], shape[-1] // side)
    boxes = [Box((*at[:-1], at[-1] * side), (*(1 for _ in shape[1:]), side)) for at in np.ndindex(counts)]
    assert problem(shape, boxes) is None
    missing = boxes.pop(len(boxes) // 2)
    assert f"no rank holds element {missing.offset}" in problem(shape, boxes)


def test_boxes_without_a_plane_between_them():
    # a pinwheel: each pair meets along some dimension, and none is cut off by a plane
    pinwheel = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1)), Box((1, 1), (1, 1))]
    assert problem((3, 3), pinwheel) is None
    assert "no rank holds element (1, 1)" in problem((3, 3), pinwheel[:-1])
    assert "overlap" in problem((3, 3), [*pinwheel, Box((1, 1), (1, 1))])


@given(st.data(), shapes)
def test_rectangles_are_the_flat_range_in_order(data, shape):
    size = int(np.prod(shape))
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    order = np.arange(size).reshape(shape)
    found = rectangles(shape, start, stop)
    assert np.concatenate([order[box.slices].reshape(-1) for box in found] or [[]]).tolist() == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)


@given(st.data(), shapes)
def test_single_run_is_contiguous_on_both_sides(data, shape):
    block = data.draw(boxes_in(shape))
    target = data.draw(boxes_in(shape))
    inner = block.intersect(target)
    if inner is None:
        return

    def is_contiguous(outer):
        flat = np.arange(outer.size).reshape(outer.shape)[inner.relative_to(outer.offset).slices].reshape(-1)
        assert flat[0] == flat_index(inner.relative_to(outer.offset).offset, outer.shape)
        return bool((np.diff(flat) == 1).all())

    expected = is_contiguous(block) and is_contiguous(target)
    assert single_run(inner, block.shape, target.shape) == expected


@pytest.mark.parametrize(
    ("box", "shape", "inside"),
    [
        (Box((), ()), (), True),
        (Box((4,), (0,)), (4,), True),
        (Box((5,), (0,)), (4,), False),
        (Box((-1,), (2,)), (4,), False),
        (Box((0,), (-1,)), (4,), False),
        (Box((0, 0), (1, 1)), (4,), False),
    ],
)
def test_inside(box, shape, inside):
    assert box.inside(shape) == inside
