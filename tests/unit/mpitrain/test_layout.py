"""Where parameters lie in a unit's flat buffer, and where it is cut: properties that hold for any shapes and any number of ranks."""

from itertools import pairwise
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.sharding.unit.layout import ALIGN, MOST_PADDING, lay_out

# with lengths 0 and 1, scalars, and rows from one element to many
SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=8)
NUM_RANKS = st.integers(1, 9)


@given(SHAPES, NUM_RANKS)
def test_parameters_lie_in_order_aligned_and_apart(shapes: list[tuple[int, ...]], num_ranks: int) -> None:
    layout = lay_out(shapes, num_ranks)
    assert [place.shape for place in layout.extents] == shapes
    assert all(place.start % ALIGN == 0 for place in layout.extents)
    for place, after in pairwise(layout.extents):
        assert place.stop <= after.start < place.stop + ALIGN
    assert layout.numel == (layout.extents[-1].stop if shapes else 0)
    covered = sorted((part.start, part.stop) for part in (*layout.extents, *layout.gaps) if part.stop > part.start)
    assert [begin for begin, _ in covered] == [0, *(end for _, end in covered)][: len(covered)]


@given(SHAPES, NUM_RANKS)
def test_shards_are_neighbours_and_cover_the_buffer(shapes: list[tuple[int, ...]], num_ranks: int) -> None:
    layout = lay_out(shapes, num_ranks)
    assert len(layout.bounds) == num_ranks + 1
    assert layout.bounds[0] == 0 and layout.bounds[-1] == layout.numel
    assert list(layout.bounds) == sorted(layout.bounds)
    assert sum(layout.counts) == layout.numel


@given(SHAPES, NUM_RANKS)
def test_boxes_are_whole_rows_that_cover_each_parameter_once(shapes: list[tuple[int, ...]], num_ranks: int) -> None:
    layout = lay_out(shapes, num_ranks)
    for index, place in enumerate(layout.extents):
        next_row = 0
        for rank in range(num_ranks):
            box = layout.box(index, rank)
            assert box.full_shape == (place.shape or (1,))
            assert len(box.shape) == len(box.offset) == len(box.full_shape)
            others = [d for d in range(len(box.shape)) if d != place.dim]
            assert all(box.shape[d] == box.full_shape[d] and box.offset[d] == 0 for d in others)
            assert all(box.full_shape[d] <= 1 for d in others if d < place.dim), "a cut before the first long dimension"
            if box.numel:
                assert box.offset[place.dim] == next_row
                next_row += box.shape[place.dim]
                # in the buffer: whole rows, and all of them in the rank's own shard
                assert box.start == place.start + box.offset[place.dim] * prod(box.full_shape[place.dim + 1 :])
                assert layout.bounds[rank] <= box.start and box.start + box.numel <= layout.bounds[rank + 1]
            else:
                assert place.start <= box.start <= place.stop
            if not place.numel:
                assert box.shape == box.full_shape, "without elements it is whole on each rank"
        assert sum(layout.box(index, rank).numel for rank in range(num_ranks)) == place.numel


@given(SHAPES, NUM_RANKS)
def test_shards_are_as_equal_as_rows_allow(shapes: list[tuple[int, ...]], num_ranks: int) -> None:
    layout = lay_out(shapes, num_ranks)
    longest_row = max((place.row for place in layout.extents if place.numel), default=0)
    for rank, bound in enumerate(layout.bounds):
        # half a row to the nearest cut, and past a parameter's end on to the beginning of the next
        assert abs(bound - layout.numel * rank / num_ranks) <= longest_row / 2 + ALIGN


@pytest.mark.parametrize(
    ("shapes", "num_ranks", "bounds"),
    [
        ([(8, 32)], 4, (0, 64, 128, 192, 256)),
        ([(1, 8, 32)], 2, (0, 128, 256)),  # the first dimension that is longer than 1
        ([(3, 32)], 2, (0, 32, 96)),  # of two cuts as near the lower
        ([()], 3, (0, 0, 1, 1)),  # a scalar cannot be cut: 1/3 is nearest to 0, 2/3 to 1
        ([(2, 100)], 4, (0, 0, 100, 100, 200)),  # fewer rows than ranks: some hold nothing
        ([], 2, (0, 0, 0)),
    ],
)
def test_cuts(shapes: list[tuple[int, ...]], num_ranks: int, bounds: tuple[int, ...]) -> None:
    assert lay_out(shapes, num_ranks).bounds == bounds


# Shards of one length: [Note: equal shards]


@given(SHAPES, NUM_RANKS)
def test_equal_shards_keep_rows_whole_and_padding_small(shapes: list[tuple[int, ...]], num_ranks: int) -> None:
    layout, numel = lay_out(shapes, num_ranks, equal=True), sum(prod(shape) for shape in shapes)
    if len(set(layout.counts)) > 1 or num_ranks == 1:
        assert layout == lay_out(shapes, num_ranks), "shards as equal as rows allow"
        return
    assert [place.shape for place in layout.extents] == shapes
    assert layout.numel - numel <= MOST_PADDING * numel or layout == lay_out(shapes, num_ranks)
    in_buffer = sorted((place for place in layout.extents if place.numel), key=lambda place: place.start)
    assert all(place.start % ALIGN == 0 for place in in_buffer)
    assert all(place.stop <= after.start for place, after in pairwise(in_buffer))
    assert not in_buffer or in_buffer[-1].stop <= layout.numel
    for index, place in enumerate(layout.extents):
        next_row = 0
        for rank in range(num_ranks):
            box = layout.box(index, rank)
            assert box.offset[place.dim] == next_row or not box.numel
            next_row += box.shape[place.dim] if box.numel else 0
            if box.numel:
                assert layout.bounds[rank] <= box.start and box.start + box.numel <= layout.bounds[rank + 1]
                assert box.start == place.start + box.offset[place.dim] * place.row
        assert sum(layout.box(index, rank).numel for rank in range(num_ranks)) == place.numel


def block(width: int) -> list[tuple[int, ...]]:
    """Of a GPT: norms, the products of attention, a feed-forward layer of four widths."""
    matrices = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    return [(width,)] * 4 + [shape for matrix in matrices for shape in (matrix, matrix[:1])]


@pytest.mark.parametrize("width", [768, 1024, 1280, 1600, 2048, 3072, 4096])
@pytest.mark.parametrize(("num_ranks", "most"), [(2, 0.0002), (3, 0.0003), (4, 0.0005), (8, 0.0021), (16, 0.0056)])
def test_blocks_of_a_transformer_have_equal_shards(width: int, num_ranks: int, most: float) -> None:
    layout, numel = lay_out(block(width), num_ranks, equal=True), sum(prod(shape) for shape in block(width))
    assert len(set(layout.counts)) == 1
    assert layout.numel - numel <= most * numel


def test_the_shortest_length_is_taken() -> None:
    # Long rows first. Half of the 76,352 elements would be within a row of 64, which ends 32 elements later.
    layout = lay_out([(64,), (1000, 64), (3, 4096)], 2, equal=True)
    assert [place.start for place in layout.extents] == [76288, 12288, 0]
    assert layout.counts == (38208, 38208)
    # Of 20 rows that are cut in three, 7 for each rank would be 5 % of padding.
    rows = [(20, 4096)]
    assert lay_out(rows, 3, equal=True) == lay_out(rows, 3)
    assert lay_out(rows, 4, equal=True).counts == (20480,) * 4


@given(SHAPES, NUM_RANKS, st.booleans(), st.data())
def test_a_buffer_for_some_of_the_parameters_has_the_same_boxes(
    shapes: list[tuple[int, ...]], num_ranks: int, equal: bool, data: st.DataObject
) -> None:
    layout = lay_out(shapes, num_ranks, equal=equal)
    indices = sorted(data.draw(st.sets(st.integers(0, len(shapes) - 1)))) if shapes else []
    some = layout.only(indices)
    assert len(some.extents) == len(indices) and len(some.bounds) == num_ranks + 1
    assert list(some.bounds) == sorted(some.bounds)
    assert sum(some.counts) == some.numel <= layout.numel
    if len(indices) < len(shapes):
        assert some.numel == max((place.stop for place in some.extents), default=0)
    for new, old in enumerate(indices):
        for rank in range(num_ranks):
            one, other = some.box(new, rank), layout.box(old, rank)
            assert one[:3] == other[:3]
            assert some.bounds[rank] <= one.start <= some.bounds[rank + 1] - one.numel or not one.numel


def test_cuts_between_parameters_leave_each_whole() -> None:
    shapes = [(12, 7), (7,), (40, 40), (3, 5), (40, 40)]
    for num_ranks in (2, 3, 8):
        layout = lay_out(shapes, num_ranks, equal=True, cut="parameters")
        for index, shape in enumerate(shapes):
            numels = [layout.box(index, rank).numel for rank in range(num_ranks)]
            assert sorted(numels)[-1] == prod(shape) == sum(numels)
    assert lay_out([(40, 40)] * 4, 2, cut="parameters").bounds == (0, 3200, 6400)
