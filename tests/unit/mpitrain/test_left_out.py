"""Samples that a run leaves out: the steps after them train on later samples, also after a resume."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.data import Batches
from mpitrain.data.left_out import merged, moved_past

BATCH = 4
INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 8)).map(lambda i: (i[0], i[0] + i[1])), max_size=4)


def batches() -> Batches:
    return Batches(np.random.default_rng(0).integers(0, 256, 4000).astype(np.uint8), context=8, batch=BATCH, seed=3)


@given(INTERVALS)
def test_merged_intervals_hold_the_same_samples(intervals: list[tuple[int, int]]) -> None:
    found = merged(intervals)
    assert {n for b, e in found for n in range(b, e)} == {n for b, e in intervals for n in range(b, e)}
    assert all(b < e for b, e in found)
    assert all(e < b for (_, e), (b, _) in pairwise(found))
    assert merged(found) == found


@given(INTERVALS, st.integers(0, 40))
def test_positions_are_the_samples_that_are_not_left_out(intervals: list[tuple[int, int]], first: int) -> None:
    left_out = merged(intervals)
    expected = [n for n in range(first, 200) if not any(b <= n < e for b, e in left_out)][:50]
    assert moved_past(first, np.arange(50), left_out).tolist() == expected


@given(INTERVALS, st.integers(0, 12), INTERVALS)
def test_a_resume_has_the_samples_of_a_run_without_a_stop(
    intervals: list[tuple[int, int]], step: int, later: list[tuple[int, int]]
) -> None:
    """`later` are left out by a rewind to `step`, after more steps."""
    whole, rest = batches(), batches()
    whole.leave_out(intervals)
    position = whole.next_sample(step)
    after = [(position + b, position + e) for b, e in later]
    rest.leave_out([*intervals, *after])
    rest.go_on(step, position)
    whole.leave_out(after)
    for number in range(step, step + 12):
        np.testing.assert_array_equal(rest.get(number, range(BATCH)), whole.get(number, range(BATCH)))
        assert rest.next_sample(number) == whole.next_sample(number)


def test_a_batch_may_lie_on_both_sides_of_what_is_left_out() -> None:
    here, plain = batches(), batches()
    here.leave_out([(6, 9)])
    np.testing.assert_array_equal(here.get(1, range(2)), plain.get(1, range(2)))
    np.testing.assert_array_equal(
        here.get(1, range(2, 4)), np.concatenate([plain.get(2, range(1, 2)), plain.get(2, range(2, 3))])
    )
    assert here.next_sample(1) == 4 and here.next_sample(2) == 11
