"""Spikes: found where they are, and never in clean series, also with heavy tails."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.job.config import TrainConfig
from mpitrain.job.health.spikes import FEWEST, MOST_IN_A_ROW, Window

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
