"""Samples that a run leaves out: the steps after them train on later samples, also after a resume."""

from itertools import pairwise
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collectives import Communicator
from mpitrain.job.config import parse, to_toml
from mpitrain.job.data import Batches
from mpitrain.job.data.left_out import merged, moved_past
from mpitrain.job.data.positions import Positions
from mpitrain.job.health.health import Bad, Health
from mpitrain.job.health.reports import Reports
from mpitrain.job.health.rewind import InitialState
from mpitrain.job.train.checkpoints.meta import checked

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


@pytest.mark.rest
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


class _Alone:
    """A communicator of one rank, for what `Health` asks of it."""

    rank, size = 0, 1

    def broadcast_object(self, value: object) -> object:
        return value

    def all_gather_object(self, value: object) -> list[object]:
        return [value]


@pytest.mark.parametrize("bad", [Bad(5890, 5900, "loss nan"), Bad(10**9, 10**9, "loss nan")])
def test_a_run_takes_its_own_checkpoint_after_a_rewind(bad: Bad) -> None:
    """A good state may lie many samples back, and the first checkpoint may be saved long before the samples that are left out."""
    config = parse(["--train.batch", "4096", "--train.max-rewinds", "1", "--checkpoint.every", "500"])
    model, comm = torch.nn.Linear(2, 2), cast(Communicator, _Alone())
    batches = Positions(4096)
    health = Health(
        config, comm, comm, model, torch.optim.SGD(model.parameters()), batches, device=torch.device("cpu"), seed_of=0,
        numbers=dict, reports=Reports(lambda *words, **fields: None, 0, lambda line: None),
    )  # fmt: skip
    health.sources.append(InitialState(lambda: None))
    assert health.go_back(bad) == 0
    meta = {
        "step": 100, "config": to_toml(config), "num_ranks": 1,
        "data": {"fingerprint": "x", "next_sample": batches.next_sample(100)}, "health": health.state_dict(),
    }  # fmt: skip
    assert meta["health"] == {"left_out": [[bad.first * 4096, (bad.last + 1) * 4096]], "rewinds": 1}
    assert checked(meta, "here") == meta
    assert batches.next_sample(bad.first) == (bad.last + 1) * 4096
