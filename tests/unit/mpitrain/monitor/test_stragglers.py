"""Slow ranks: found where they are, with their cause, and never in clean series, also with heavy tails."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.job.record.stragglers import IN_A_ROW, LEAST_S, RankTimes, Straggler, Stragglers


def step(watch: Stragglers, seconds: Sequence[float], rows: Sequence[int]) -> list[Straggler]:
    """A step in which the ranks did nothing but compute."""
    busy, none = np.array(seconds), np.zeros(len(seconds))
    return watch.step(RankTimes(busy, none, busy, none, np.array(rows, float)))


def names(found: list[Straggler]) -> list[int]:
    return [each.rank for each in found]


def test_a_slow_rank_is_named_once_for_each_episode() -> None:
    watch = Stragglers(["a"] * 4)
    slow, usual = [1.0, 1.0, 1.3, 1.0], [1.0, 1.02, 1.2, 0.98]
    said = [step(watch, slow, [3] * 4) for _ in range(3 * IN_A_ROW)]
    assert [bool(found) for found in said] == [step == IN_A_ROW - 1 for step in range(3 * IN_A_ROW)]
    (found,) = said[IN_A_ROW - 1]
    assert (found.rank, found.steps) == (2, IN_A_ROW) and found.factor == pytest.approx(1.3)
    assert found.seconds == pytest.approx(0.3 * IN_A_ROW)
    assert step(watch, usual, [3] * 4) == []
    assert [names(step(watch, slow, [3] * 4)) for _ in range(IN_A_ROW)] == [[]] * (IN_A_ROW - 1) + [[2]]


def test_short_steps_take_at_least_some_seconds() -> None:
    watch = Stragglers(["a"] * 2)
    steps = next(count for count in range(1, 10**4) if step(watch, [0.01, 0.02], [1, 1]))
    assert steps in (round(LEAST_S / 0.02), round(LEAST_S / 0.02) + 1)  # a sum of floats


def test_ranks_of_other_stages_are_not_compared() -> None:
    """The first stage has twice the work. One of its ranks is slow even so."""
    watch = Stragglers([(0, 5), (0, 5), (1, 3), (1, 3)])
    found = [step(watch, [2.0, 3.0, 1.0, 1.0], [3] * 4) for _ in range(IN_A_ROW)]
    assert names(found[-1]) == [1] and not any(found[:-1])
    alone = Stragglers([0, 1, 2])
    assert not any(step(alone, [1.0, 9.0, 1.0], [3] * 3) for _ in range(50))


@pytest.mark.rest
@given(st.lists(st.integers(1, 5), min_size=2, max_size=5), st.floats(0, 1), st.integers(0, 4))
def test_unequal_rows_are_no_straggler_and_hide_none(rows: list[int], fixed: float, slow: int) -> None:
    """Each rank takes a fixed time, and a time for each of its rows."""
    seconds = [fixed + (1 - fixed) * count for count in rows]
    watch = Stragglers([0] * len(rows))
    assert not any(step(watch, seconds, rows) for _ in range(2 * IN_A_ROW))
    rank = slow % len(rows)
    seconds[rank] = 1.3 * max(
        fixed + (1 - fixed) * max(rows), rows[rank] * max(s / r for s, r in zip(seconds, rows, strict=True))
    )
    watch.forget()
    found = [names(step(watch, [10 * s for s in seconds], rows)) for _ in range(IN_A_ROW)]
    assert found[-1] == [rank]


@pytest.mark.rest
@pytest.mark.parametrize("noise", ["normal", "heavy"])
def test_noise_makes_no_straggler(noise: str) -> None:
    rng = np.random.default_rng(0)
    watch = Stragglers([0] * 4)
    for _ in range(20_000):
        extra = rng.standard_normal(4) * 0.2 if noise == "normal" else rng.pareto(1.5, 4) * 0.2
        assert step(watch, np.abs(1 + extra).tolist(), [3] * 4) == []


def test_times_that_were_not_measured_name_no_rank() -> None:
    watch = Stragglers([0, 0])
    assert not any(step(watch, [1.0, 0.0], [3, 3]) for _ in range(50))
    assert not any(step(watch, [1.0, -0.1], [3, 3]) for _ in range(50))


@pytest.mark.parametrize("num_ranks", [2, 5])
@pytest.mark.parametrize(
    ("cause", "spent"),
    [
        ("data", (1.4, 0.45, 0.95, 0.0)),
        ("cpu", (1.4, 0.01, 1.0, 0.4)),
        ("blocked", (1.4, 0.01, 1.0, 0.0)),
        ("compute", (1.4, 0.01, 1.4, 0.0)),
        ("compute", (1.4, 0.01, 1.4, np.nan)),
    ],
)
def test_the_cause_is_named(num_ranks: int, cause: str, spent: tuple[float, ...]) -> None:
    """busy, data, CPU time, run delay. The others wait with full use of their cores, as MPI does."""
    usual = (1.0, 0.02, 1.4, 0.01)
    watch = Stragglers([0] * num_ranks)
    columns = np.array([spent] + [usual] * (num_ranks - 1)).T
    found = [watch.step(RankTimes(*columns, np.full(num_ranks, 4.0))) for _ in range(IN_A_ROW)]
    (straggler,) = found[-1]
    assert (straggler.rank, straggler.cause) == (0, cause)
    assert straggler.cause_s == pytest.approx(0.4, abs=0.05)
    assert f"{straggler.cause_s * 1e3:.0f} ms" in straggler.words


def test_a_thousand_ranks_are_judged_in_a_millisecond_or_so() -> None:
    """The rule compares each rank with all others, but looks closely at few."""
    rng = np.random.default_rng(0)
    watch = Stragglers([0] * 1024)
    for at in range(IN_A_ROW):
        seconds = 1 + 0.05 * rng.random(1024)
        seconds[77] = 1.5
        found = step(watch, seconds.tolist(), [3] * 1024)
        assert [each.rank for each in found] == [77] * (at == IN_A_ROW - 1)
