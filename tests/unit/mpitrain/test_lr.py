"""The learning rate against its closed form, and what every schedule has."""

import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mpitrain.job.config import Config, OptimConfig, TrainConfig
from mpitrain.job.train.steps.lr import highest_rate, learning_rate, warmup_steps


def rates(steps: int, num: int | None = None, **optim: Any) -> list[float]:
    """Of the steps of a run; of `num` steps if given."""
    settings = {"lr": 2.0, "min_lr_ratio": 0.25, "warmup_steps": 4} | optim
    config = Config(optim=OptimConfig(**settings), train=TrainConfig(steps=steps))
    return [learning_rate(config, step) for step in range(num or steps)]


def test_warm_up_rises_evenly_and_then_a_cosine_falls() -> None:
    found = rates(15)
    assert found[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert found[9] == pytest.approx((2.0 + 0.5) / 2)  # half-way between steps 4 and 14
    assert found[14] == pytest.approx(0.5)
    assert found[4:] == sorted(found[4:], reverse=True)


def test_past_the_end_it_stays_at_the_lowest() -> None:
    for schedule in ("cosine", "linear", "wsd"):
        assert rates(15, 41, schedule=schedule)[40] == pytest.approx(0.5)


def test_without_warm_up_the_first_step_has_the_highest() -> None:
    assert rates(10, warmup_steps=0)[0] == 2.0


@pytest.mark.parametrize("steps", [1, 3, 4, 5])
def test_runs_shorter_than_the_warm_up(steps: int) -> None:
    assert rates(steps) == [0.5, 1.0, 1.5, 2.0, 2.0][:steps]


def test_closed_forms_of_the_other_schedules() -> None:
    warm_up = [0.5, 1.0, 1.5, 2.0]
    assert rates(9, schedule="constant") == [*warm_up, *[2.0] * 5]
    assert rates(9, schedule="linear") == pytest.approx([*warm_up, 2.0, 1.625, 1.25, 0.875, 0.5])
    # 40 % of the 10 steps after the first: it falls from step 6.
    falls = [0.5 + 1.5 * (1 - math.sqrt(quarter / 4)) for quarter in range(5)]
    assert rates(11, schedule="wsd", decay_ratio=0.4) == pytest.approx([*warm_up, 2.0, 2.0, *falls])
    assert (
        rates(101, schedule="wsd").count(2.0) == 1 + 101 - 20 - 4
    )  # 20 % by default, after the last step of the warm-up


@given(
    schedule=st.sampled_from(["cosine", "linear", "wsd", "constant"]),
    steps=st.integers(1, 300),
    warmup=st.integers(0, 350),
    lowest=st.floats(0, 1),
    decay=st.floats(0.01, 1),
)
@example(schedule="wsd", steps=2, warmup=0, lowest=0.0, decay=0.5)  # half a step falls, too
def test_what_every_schedule_has(schedule: str, steps: int, warmup: int, lowest: float, decay: float) -> None:
    """It rises in the warm-up, never rises after it, stays within its bounds, and ends where it should."""
    more = {"decay_ratio": decay} if schedule == "wsd" else {}
    found = rates(steps, schedule=schedule, warmup_steps=warmup, min_lr_ratio=lowest, **more)
    ends = 2.0 if schedule == "constant" else 2.0 * lowest
    assert found[:warmup] == sorted(found[:warmup]) and found[warmup:] == sorted(found[warmup:], reverse=True)
    assert all(0 < rate <= 2.0 for rate in found[:warmup])
    assert all(ends - 1e-12 <= rate <= 2.0 for rate in found[warmup:])
    if warmup < steps:
        assert found[warmup] == 2.0 and (found[-1] == pytest.approx(ends) or warmup == steps - 1)
    if warmup < steps - 1 and schedule != "constant":
        # No jump: a step changes the rate by no more than a fall of the steepest form, sqrt, over the steps that fall.
        falling = round((steps - 1) * decay) if schedule == "wsd" else steps - 1 - warmup
        falling = max(min(falling, steps - 1 - warmup), 1)
        steepest = {"cosine": math.pi / 2 / falling, "linear": 1 / falling, "wsd": 1 / math.sqrt(falling)}[schedule]
        differences = [a - b for a, b in zip(found[warmup:], found[warmup + 1 :], strict=False)]
        assert max(differences) <= (2.0 - ends) * steepest + 1e-12


@pytest.mark.parametrize(("scaling", "expected"), [("linear", 8.0), ("sqrt", 4.0)])
def test_the_rate_grows_with_the_batch(scaling: str, expected: float) -> None:
    optim = OptimConfig(lr=2.0, warmup_steps=0, lr_scaling=scaling, base_batch=12)  # type: ignore[arg-type]
    config = Config(optim=optim, train=TrainConfig(batch=48))
    assert highest_rate(config) == learning_rate(config, 0) == expected
    assert learning_rate(config, config.train.steps - 1) == pytest.approx(0.1 * expected)


def test_a_warm_up_in_tokens() -> None:
    context = Config().model.resolve().context
    for tokens, steps in ((0, 50), (1, 1), (6 * context, 1), (6 * context + 1, 2), (60 * context, 10)):
        config = Config(optim=OptimConfig(warmup_tokens=tokens), train=TrainConfig(batch=6))
        assert warmup_steps(config) == steps
