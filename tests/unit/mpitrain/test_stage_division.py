"""The blocks of each stage: the most expensive stage is as cheap as possible."""

import random
import time
from itertools import accumulate, combinations
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from collectives import Communicator
from mpitrain.models import GPT, GPTConfig
from mpitrain.placement import parts
from mpitrain.stages.division import costs_of
from mpitrain.stages.schedules.dividing import divide


@settings(deadline=None, max_examples=100)
@given(
    before=st.integers(0, 5),
    blocks=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    after=st.integers(0, 9),
    num_stages=st.integers(1, 6),
)
def test_no_division_is_better(before: int, blocks: list[int], after: int, num_stages: int) -> None:
    count = len(blocks)
    if num_stages > count + 1:
        with pytest.raises(ValueError, match=f"{num_stages} stages need at least {num_stages - 1} blocks"):
            divide(before, blocks, after, num_stages)
        return
    found = divide(before, blocks, after, num_stages)
    assert [at for stage in found for at in stage] == list(range(count))
    assert all(stage for stage in (found[:-1] or found))

    def worst(ends: tuple[int, ...]) -> int:
        sums = [sum(blocks[begin:end]) for begin, end in zip((0, *ends), (*ends, count), strict=True)]
        sums[0], sums[-1] = sums[0] + before, sums[-1] + after
        return max(sums)

    best = min(worst(ends) for ends in combinations(range(1, count + 1), num_stages - 1))
    assert worst(tuple(stage.stop for stage in found[:-1])) <= best


def test_of_equal_divisions_it_is_always_the_same_one() -> None:
    """The last stages begin as late as they can, as a search of all divisions finds."""
    rng = random.Random(0)
    for _ in range(300):
        count = rng.randrange(12)
        blocks = [rng.choice((0.1, 0.2, 1.0, rng.random())) for _ in range(count)]
        before, after, num_stages = rng.choice((0.0, 0.7, 9.0)), rng.choice((0.0, 0.7, 9.0)), rng.randint(1, count + 1)
        sums = [0.0, *accumulate(blocks)]
        best = {end: (before + sums[end], (end,)) for end in range(count + 1) if end or num_stages == 1}
        for stage in range(1, num_stages):
            is_last = stage == num_stages - 1
            best = {
                end: min(
                    (
                        (max(best[begin][0], sums[end] - sums[begin] + after * is_last), (*best[begin][1], end))
                        for begin in range(end + is_last)
                        if begin in best
                    ),
                    key=lambda its: (its[0], -its[1][-2]),
                )
                for end in range(stage + 1 - is_last, count + 1)
            }
        found = divide(before, blocks, after, num_stages)
        assert tuple(stage.stop for stage in found) == best[count][1]


@pytest.mark.parametrize("num_stages", [2, 512, 2048])
def test_thousands_of_blocks_take_a_second(num_stages: int) -> None:
    began = time.process_time()
    found = divide(0.0, [1.0] * 2048, 0.5, num_stages)
    assert time.process_time() - began < 2
    assert {len(stage) for stage in found} == {2048 // num_stages}


def test_costs() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab=50, context=8, width=12, layers=2, heads=2, tied=True))
    block = 12 * 36 + 12 * 12 + 2 * 12 * 48
    assert costs_of(model, model.stage_plan) == (0, [block, block], 50 * 12)


def test_ranks_that_share_matrices_unequally_count_the_same_costs() -> None:
    """Otherwise they would divide the model in different ways."""
    config = GPTConfig(vocab=11, context=8, width=10, layers=2, heads=2, tied=True)
    costs = []
    for rank in range(3):
        model = GPT(config)
        over = cast(Communicator, SimpleNamespace(rank=rank, size=3))
        for module in model.modules():
            for key, whole in module._parameters.items():
                if whole is not None and whole.ndim == 2:
                    part = parts.cut(whole.shape, 0, over)
                    module._parameters[key] = nn.Parameter(part.take(whole.detach()))
                    parts.mark_part(module._parameters[key], part)
        costs.append(costs_of(model, model.stage_plan))
    _, blocks, after = costs_of(GPT(config), GPT(config).stage_plan)
    assert costs[0] == costs[1] == costs[2] == (0, [cost / 3 for cost in blocks], after / 3)
