"""The blocks of each stage: the most expensive stage is as cheap as possible."""

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.models import GPT, GPTConfig
from mpitrain.stages.division import costs_of, divide


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


def test_costs() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab=50, context=8, width=12, layers=2, heads=2, tied=True))
    block = 12 * 36 + 12 * 12 + 2 * 12 * 48
    assert costs_of(model, model.stage_plan) == (0, [block, block], 50 * 12)
