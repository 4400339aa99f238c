"""The learning rate against its closed form."""

import pytest

from mpitrain.config import OptimConfig
from mpitrain.train.lr import learning_rate

OPTIM = OptimConfig(lr=2.0, min_lr_ratio=0.25, warmup_steps=4)


def test_warm_up_rises_evenly_and_then_a_cosine_falls() -> None:
    rates = [learning_rate(OPTIM, step, 15) for step in range(15)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates[9] == pytest.approx((2.0 + 0.5) / 2)  # half-way between steps 4 and 14
    assert rates[14] == pytest.approx(0.5)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_past_the_end_it_stays_at_the_lowest() -> None:
    assert learning_rate(OPTIM, 40, 15) == pytest.approx(0.5)


def test_without_warm_up_the_first_step_has_the_highest() -> None:
    assert learning_rate(OptimConfig(lr=2.0, warmup_steps=0), 0, 10) == 2.0


@pytest.mark.parametrize("steps", [1, 3, 4, 5])
def test_runs_shorter_than_the_warm_up(steps: int) -> None:
    rates = [learning_rate(OPTIM, step, steps) for step in range(steps)]
    assert rates == [0.5, 1.0, 1.5, 2.0, 2.0][:steps]
