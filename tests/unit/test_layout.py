"""Where parameters lie in a unit's flat buffer, and where it is cut: properties that hold for any shapes and any number of ranks."""

from itertools import pairwise
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.sharding.layout import ALIGN, lay_out

# with lengths 0 and 1, scalars, and rows from one element to many
SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=8)
NUM_RANKS = st.integers(1, 9)


@given(SHAPES, NUM_RANKS)
def test_parameters_lie_in_order_aligned_and_apart(shapes: list[tuple[int, ...]], num_ranks: int) -> None:
    layout = lay_out(shapes, num_ranks)
    assert [place.shape for place in layout.places] == shapes
    assert all(place.start % ALIGN == 0 for place in layout.places)
    for place, after in pairwise(layout.places):
        assert place.stop <= after.start < place.stop + ALIGN
    assert layout.numel == (layout.places[-1].stop if shapes else 0)


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
    for index, place in enumerate(layout.places):
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
        assert sum(layout.box(index, rank).numel for rank in range(num_ranks)) == place.numel


@given(SHAPES, NUM_RANKS)
def test_shards_are_as_equal_as_rows_allow(shapes: list[tuple[int, ...]], num_ranks: int) -> None:
    layout = lay_out(shapes, num_ranks)
    longest_row = max((place.row for place in layout.places if place.numel), default=0)
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
