"""Spikes and stragglers: found where they are, and never in clean series, also with heavy tails."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.config import TrainConfig
from mpitrain.health import stragglers
from mpitrain.health.spikes import FEWEST, MOST_IN_A_ROW, Window
from mpitrain.health.stragglers import IN_A_ROW, LEAST_S, Stragglers

THRESHOLD = TrainConfig().spike_threshold


def spikes_in(window: Window, values: np.ndarray) -> list[int]:
    """The places of the spikes, as a run finds them."""
    found = []
    for at, value in enumerate(values.tolist()):
        if window.judge(value) is None:
            window.accept(value)
        else:
            window.refuse()
            found.append(at)
    return found


NOISES = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "Laplace": lambda rng, n: rng.laplace(size=n),
    "Student's t, 5 degrees": lambda rng, n: rng.standard_t(5, n),
    "steps of rounding": lambda rng, n: np.round(rng.standard_normal(n), 0),
    "constant": lambda rng, n: np.zeros(n),
}


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("in_logs", [False, True], ids=["loss", "norm"])
def test_2000_clean_steps_give_no_false_alarm(noise: str, in_logs: bool) -> None:
    """With a falling loss, and a norm that rises in the warm-up and falls after it."""
    steps = np.arange(2000)
    for seed in range(4):
        values = NOISES[noise](np.random.default_rng(seed), 2000)
        series = 2 + 4 * np.exp(-steps / 50) + 0.1 * values
        if in_logs:
            series = np.exp(0.2 * values) * np.where(steps < 50, 0.1 + steps / 25, 2 * np.exp(-(steps - 50) / 400))
        assert spikes_in(Window("x", THRESHOLD, in_logs=in_logs), series) == [], (noise, seed)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 999),
    at=st.integers(FEWEST, 300),
    size=st.floats(25, 1e6),
    scale=st.floats(1e-3, 1e3),
    length=st.integers(1, MOST_IN_A_ROW),
)
def test_a_spike_is_found_where_it_is(seed: int, at: int, size: float, scale: float, length: int) -> None:
    """Whatever the unit of the values. Spikes do not enter the window, so each of several in a row is found."""
    noise = np.random.default_rng(seed).uniform(-1, 1, 400)
    values = 3 + 0.1 * noise
    values[at : at + length] += 0.1 * size
    assert spikes_in(Window("x", THRESHOLD), scale * values) == list(range(at, at + length))
    assert spikes_in(Window("x", THRESHOLD), -scale * values) == [], "a value far below is good news"


def test_a_new_level_is_no_spike_for_ever() -> None:
    values = np.concatenate([np.ones(100), np.full(200, 9.0)])
    assert spikes_in(Window("x", THRESHOLD), values) == list(range(100, 100 + MOST_IN_A_ROW + 1))


def test_a_window_goes_on_from_its_state() -> None:
    rng = np.random.default_rng(0)
    values = 1 + 0.01 * rng.standard_normal(300)
    values[250:253] = 4
    whole, first, rest = (Window("x", THRESHOLD, in_logs=True) for _ in range(3))
    expected = spikes_in(whole, values)
    found = spikes_in(first, values[:251])
    rest.load(first.state())
    assert found + [251 + at for at in spikes_in(rest, values[251:])] == expected == [250, 251, 252]
    assert rest.state() == whole.state()
    rest.load(())
    assert rest.state() == [0]


# Stragglers


def names(found: list[stragglers.Straggler]) -> list[int]:
    return [each.rank for each in found]


def test_a_slow_rank_is_named_once_for_each_episode() -> None:
    watch = Stragglers(["a"] * 4)
    slow, usual = [1.0, 1.0, 1.3, 1.0], [1.0, 1.02, 1.2, 0.98]
    said = [watch.step(slow, [3] * 4) for _ in range(3 * IN_A_ROW)]
    assert [bool(found) for found in said] == [step == IN_A_ROW - 1 for step in range(3 * IN_A_ROW)]
    (found,) = said[IN_A_ROW - 1]
    assert (found.rank, found.steps) == (2, IN_A_ROW) and found.factor == pytest.approx(1.3)
    assert found.seconds == pytest.approx(0.3 * IN_A_ROW)
    assert watch.step(usual, [3] * 4) == []
    assert [names(watch.step(slow, [3] * 4)) for _ in range(IN_A_ROW)] == [[]] * (IN_A_ROW - 1) + [[2]]


def test_short_steps_take_at_least_some_seconds() -> None:
    watch = Stragglers(["a"] * 2)
    steps = next(step for step in range(1, 10**4) if watch.step([0.01, 0.02], [1, 1]))
    assert steps in (round(LEAST_S / 0.02), round(LEAST_S / 0.02) + 1)  # a sum of floats


def test_ranks_of_other_stages_are_not_compared() -> None:
    """The first stage has twice the work. One of its ranks is slow even so."""
    watch = Stragglers([(0, 5), (0, 5), (1, 3), (1, 3)])
    found = [watch.step([2.0, 3.0, 1.0, 1.0], [3] * 4) for _ in range(IN_A_ROW)]
    assert names(found[-1]) == [1] and not any(found[:-1])
    alone = Stragglers([0, 1, 2])
    assert not any(alone.step([1.0, 9.0, 1.0], [3] * 3) for _ in range(50))


@given(st.lists(st.integers(1, 5), min_size=2, max_size=5), st.floats(0, 1), st.integers(0, 4))
def test_unequal_rows_are_no_straggler_and_hide_none(rows: list[int], fixed: float, slow: int) -> None:
    """Each rank takes a fixed time, and a time for each of its rows."""
    seconds = [fixed + (1 - fixed) * count for count in rows]
    watch = Stragglers([0] * len(rows))
    assert not any(watch.step(seconds, rows) for _ in range(2 * IN_A_ROW))
    rank = slow % len(rows)
    seconds[rank] = 1.3 * max(
        fixed + (1 - fixed) * max(rows), rows[rank] * max(s / r for s, r in zip(seconds, rows, strict=True))
    )
    watch.forget()
    found = [names(watch.step([10 * s for s in seconds], rows)) for _ in range(IN_A_ROW)]
    assert found[-1] == [rank]


@pytest.mark.parametrize("noise", ["normal", "heavy"])
def test_noise_makes_no_straggler(noise: str) -> None:
    rng = np.random.default_rng(0)
    watch = Stragglers([0] * 4)
    for _ in range(20_000):
        extra = rng.standard_normal(4) * 0.2 if noise == "normal" else rng.pareto(1.5, 4) * 0.2
        assert watch.step(np.abs(1 + extra).tolist(), [3] * 4) == []


def test_times_that_were_not_measured_name_no_rank() -> None:
    watch = Stragglers([0, 0])
    assert not any(watch.step([1.0, 0.0], [3, 3]) for _ in range(50))
    assert not any(watch.step([1.0, -0.1], [3, 3]) for _ in range(50))
