"""The simulation of runs: exact without disturbances, as the formulas say with them, and as a plain simulation of single events."""

import argparse
import heapq
import io
import json
import time
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from mpitrain.stages.schedules import SCHEDULES, Schedule, Times
from mpitrain.stages.schedules.timeline import timeline
from mpitrain.tools.plan.simulation import Job, draw, simulate, simulate_command
from mpitrain.tools.plan.simulation.interval import best_interval, daly_s, expected_goodput, sampled_goodput, young_s
from mpitrain.tools.plan.simulation.outcome import CAUSES
from mpitrain.tools.plan.simulation.run import run_through
from mpitrain.tools.plan.simulation.steps import Disturbed, SlowRanks, pipeline_seconds, slow_places

ONE_STAGE = SCHEDULES["gpipe"](1, 1)
FORWARD = (Times(1.0, 0.0, 0.0),)
"""A step of one action of a second, if there are one stage and one micro-batch."""


def of_stages(schedule: Schedule, times: Times) -> tuple[Times, ...]:
    """The times of each stage, from those of a rank."""
    v = schedule.stages_per_rank
    return (Times(times.forward / v, times.input_grads / v, times.weight_grads / v, times.message),)


def failing_run(**changes: object) -> Job:
    given = {"mtbf_hours": 3.0, "checkpoint_steps": 100, "checkpoint_s": 20.0, "restart_s": 300.0, "hours": 10_000.0}
    return Job(ONE_STAGE, (Times(2.0, 1.0, 1.0),), **(given | changes))  # type: ignore[arg-type]


# Steps


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_step_without_disturbances_takes_what_the_formula_of_the_schedule_says(name: str) -> None:
    schedule, times = SCHEDULES[name](4, 8), Times(1.0, 1.0, 1.0)
    job = Job(schedule, of_stages(schedule, times), copies=3, tensor_ranks=2, reduction_s=0.5, optimizer_s=0.25)
    outcome = simulate(job)
    idle = schedule.idle(times)
    assert idle is not None
    if name == "zb-v":
        idle += 3 / 2  # the wait of the last rank for its first forward, which the formula of this schedule leaves out
    assert outcome.mean_step_s == pytest.approx(8 * times.work + idle + 0.75, rel=1e-12)
    assert outcome.parts_s["bubble"] == pytest.approx(idle, abs=1e-9)
    assert outcome.ideal_s == outcome.with_jitter_s == outcome.with_slow_s == outcome.mean_step_s


def test_a_step_with_messages_takes_as_long_as_its_timeline() -> None:
    schedule, times = SCHEDULES["interleaved"](4, 8, 3), Times(0.3, 0.4, 0.2, 0.05)
    outcome = simulate(Job(schedule, of_stages(schedule, times), copies=2))
    assert outcome.ideal_s == pytest.approx(timeline(schedule, times).total, rel=1e-12)
    without = timeline(schedule, times._replace(message=0)).total
    assert outcome.parts_s["messages"] == pytest.approx(outcome.ideal_s - without)


@pytest.mark.parametrize(("copies", "tensor_ranks"), [(1, 1), (1, 8), (16, 1), (16, 8)])
def test_one_action_takes_as_long_as_the_slowest_of_all_ranks(copies: int, tensor_ranks: int) -> None:
    """The largest of n exponential values is 1 + 1/2 + ... + 1/n on average, with a variance of 1 + 1/4 + ... + 1/n^2."""
    job = Job(ONE_STAGE, FORWARD, copies=copies, tensor_ranks=tensor_ranks, jitter=0.5)
    n, num_steps = copies * tensor_ranks, 20_000
    seconds = pipeline_seconds(job, slow_places(job, 0), Disturbed(0.5, 1.0), steps=num_steps, seed=0)
    harmonic, squares = (sum(1 / k**power for k in range(1, n + 1)) for power in (1, 2))
    error = 0.5 * (squares / num_steps) ** 0.5
    assert abs(seconds.mean() - (1 + 0.5 * harmonic)) < 4 * error
    assert seconds.var() == pytest.approx(0.25 * squares, rel=0.1)


def test_groups_with_slow_ranks_draw_the_same_distribution() -> None:
    """If all ranks are marked as slow, but with a factor of 1, each rank has its own draw instead of one for its group."""
    job = Job(ONE_STAGE, FORWARD, copies=4, tensor_ranks=4, jitter=0.5, slow_ranks=16)
    marked = pipeline_seconds(job, slow_places(job, 0), Disturbed(0.5, 1.0), steps=20_000, seed=0)
    none = replace(job, slow_ranks=0)
    plain = pipeline_seconds(none, slow_places(none, 0), Disturbed(0.5, 1.0), steps=20_000, seed=1)
    assert marked.mean() == pytest.approx(plain.mean(), rel=0.01)
    assert marked.std() == pytest.approx(plain.std(), rel=0.05)


def test_a_slow_rank_delays_all_steps() -> None:
    schedule = SCHEDULES["1f1b"](4, 32)
    outcome = simulate(Job(schedule, (Times(1, 1, 1),), copies=8, tensor_ranks=4, slow_ranks=1, slow_factor=1.2))
    assert outcome.with_slow_s == outcome.mean_step_s
    assert outcome.mean_step_s == pytest.approx(32 * 3 * 1.2 + 3 * 3, rel=1e-12)  # the others pass on what it needs
    assert outcome.parts_s["slow ranks"] == pytest.approx(32 * 3 * 0.2, rel=1e-12)


def test_every_rank_slow_is_a_slower_machine() -> None:
    schedule = SCHEDULES["zb-h1"](4, 8)
    job = Job(schedule, (Times(1, 2, 1),), copies=2, tensor_ranks=2, slow_ranks=16, slow_factor=1.5)
    assert simulate(job).mean_step_s == pytest.approx(1.5 * simulate(replace(job, slow_ranks=0)).mean_step_s)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_steps_equal_those_of_a_plain_simulation(data: st.DataObject) -> None:
    """With stages of different times, messages, copies and slow ranks."""
    name = data.draw(st.sampled_from([*SCHEDULES]))
    num_ranks = data.draw(st.integers(1, 4))
    num_micro = (
        num_ranks * data.draw(st.integers(2, 4))
        if name in ("interleaved", "dualpipe-v")
        else data.draw(st.integers(1, 9))
    )
    schedule = SCHEDULES[name](num_ranks, num_micro)
    seconds = st.floats(0.01, 2)
    times = tuple(Times(*data.draw(st.tuples(*[seconds] * 4))) for _ in range(schedule.num_stages))
    job = Job(
        schedule, times, copies=data.draw(st.integers(1, 3)), tensor_ranks=data.draw(st.integers(1, 3)), slow_factor=1.7
    )
    job = replace(job, slow_ranks=data.draw(st.integers(0, job.num_ranks)))
    places = slow_places(job, seed=5)
    found = pipeline_seconds(job, places, Disturbed(0.0, 1.7 if job.slow_ranks else 1.0), steps=1, seed=5)

    def took(copy: int, rank: int, seconds: float) -> float:
        return seconds * max(speeds(places[rank], copy, job))

    assert found == pytest.approx(max(plainly(job, copy, took) for copy in range(job.copies)), rel=1e-9)


@pytest.mark.rest
def test_jitter_has_the_effect_that_it_has_in_a_plain_simulation() -> None:
    schedule = SCHEDULES["zb-h1"](3, 5)
    job = Job(schedule, (Times(1, 1.5, 0.5, 0.1),), copies=2, tensor_ranks=2, jitter=0.3, slow_ranks=1)
    places, random = slow_places(job, 0), np.random.default_rng(7)

    def took(copy: int, rank: int, seconds: float) -> float:
        return seconds * max(
            speed * (1 + job.jitter * random.exponential()) for speed in speeds(places[rank], copy, job)
        )

    plain = np.array([max(plainly(job, copy, took) for copy in range(2)) for _ in range(1500)])
    found = pipeline_seconds(job, places, Disturbed(0.3, 1.2), steps=4000, seed=0)
    error = (plain.var() / len(plain) + found.var() / len(found)) ** 0.5
    assert abs(plain.mean() - found.mean()) < 4 * error
    assert plain.std() == pytest.approx(found.std(), rel=0.1)


def speeds(place: SlowRanks, copy: int, job: Job) -> list[float]:
    """How many times as long each rank of a tensor group takes."""
    at = [*place.copies].index(copy) if copy in place.copies else None
    return [1.0] * job.tensor_ranks if at is None else [job.slow_factor if slow else 1.0 for slow in place.is_slow[at]]


def plainly(job: Job, copy: int, took: object) -> float:
    """The seconds of one copy's step: a heap of events, each the end of an action or the arrival of a message."""
    schedule = job.schedule
    programs = [list(schedule.program(rank)) for rank in range(schedule.num_ranks)]
    there: list[set[tuple[str, int, int]]] = [set() for _ in programs]
    is_busy = [False] * len(programs)
    events: list[tuple[float, int, int, tuple[str, int, int] | None]] = []
    now, number, last = 0.0, 0, schedule.num_stages - 1

    def post(at: float, rank: int, result: tuple[str, int, int] | None) -> None:
        nonlocal number
        number += 1
        heapq.heappush(events, (at, number, rank, result))

    def begin(rank: int) -> None:
        if is_busy[rank] or not programs[rank]:
            return
        kind, stage, micro = action = programs[rank][0]
        if kind == "F" and stage and ("F", stage, micro) not in there[rank]:
            return
        if kind in "BI" and stage < last and ("B", stage, micro) not in there[rank]:
            return
        programs[rank].pop(0)
        is_busy[rank] = True
        times = job.of_stage(stage)
        seconds = {"F": times.forward, "B": times.backward, "I": times.input_grads, "W": times.weight_grads}[kind]
        ends = now + took(copy, rank, seconds)  # type: ignore[operator]
        post(ends, rank, None)
        to = stage + 1 if action.kind == "F" else stage - 1
        if kind != "W" and 0 <= to <= last:
            other = schedule.rank_of(to)
            post(ends + (times.message if other != rank else 0), other, ("F" if kind == "F" else "B", to, micro))

    for rank in range(len(programs)):
        begin(rank)
    end = 0.0
    while events:
        now, _, rank, result = heapq.heappop(events)
        if result is None:
            is_busy[rank], end = False, now
        else:
            there[rank].add(result)
        begin(rank)
    assert not any(programs)
    return end


def test_more_jitter_never_shortens_a_step() -> None:
    """The draws are the same, so this holds for every single step."""
    job = Job(SCHEDULES["1f1b"](4, 8), (Times(1, 1, 1),), copies=4, tensor_ranks=2, slow_ranks=2)
    steps = [simulate(replace(job, jitter=jitter)).step_s for jitter in (0.01, 0.02, 0.1, 0.5)]
    for less, more in pairwise(steps):
        assert (less < more).all()


# Runs


def test_a_run_without_failures_is_exact() -> None:
    outcome = simulate(failing_run(mtbf_hours=inf, steps=1000, tokens=8))
    assert outcome.run.total_s == 1000 * 4 + 9 * 20  # no checkpoint after the last step: the run ends
    assert (outcome.run.steps, outcome.run.failures, outcome.run.lost_s, outcome.run.restarts_s) == (1000, 0, 0, 0)
    assert outcome.goodput == pytest.approx(4000 / 4180)
    assert outcome.tokens_per_s == pytest.approx(8000 / 4180)


def test_a_run_ends_at_its_hour() -> None:
    run = simulate(failing_run(mtbf_hours=inf, hours=1, checkpoint_s=0.0, checkpoint_steps=1)).run
    assert (run.total_s, run.steps, run.training_s) == (3600, 900, 3600)


@pytest.mark.rest
@pytest.mark.parametrize(
    ("interval", "cost", "restart", "mtbf_hours"),
    [(100, 20, 300, 3), (20, 5, 3000, 1), (400, 60, 0, 2), (5, 1, 60, 0.2)],
)
def test_goodput_with_failures_is_that_of_dalys_formula(
    interval: int, cost: int, restart: int, mtbf_hours: float
) -> None:
    job = failing_run(
        checkpoint_steps=interval, checkpoint_s=cost, restart_s=restart, mtbf_hours=mtbf_hours, hours=8000 * mtbf_hours
    )
    outcome = simulate(job, seed=3)
    formula = expected_goodput(4 * interval, checkpoint_s=cost, restart_s=restart, mtbf_s=3600 * mtbf_hours)
    assert outcome.expected_goodput == pytest.approx(formula)
    assert outcome.goodput == pytest.approx(formula, rel=0.02)
    assert outcome.run.failures == pytest.approx(8000, rel=0.05)


def test_the_time_of_a_run_is_divided_completely() -> None:
    schedule = SCHEDULES["1f1b"](4, 8)
    job = Job(
        schedule, (Times(0.2, 0.2, 0.2, 0.01),), copies=4, tensor_ranks=2, reduction_s=0.1, optimizer_s=0.1, jitter=0.05,
        slow_ranks=1, mtbf_hours=2, checkpoint_steps=50, checkpoint_s=5, restart_s=200, hours=100,
    )  # fmt: skip
    outcome = simulate(job)
    assert list(outcome.shares) == list(CAUSES)
    assert sum(outcome.shares.values()) == pytest.approx(1)
    assert all(share > 0 for share in outcome.shares.values())
    assert sum(outcome.parts_s.values()) == pytest.approx(outcome.mean_step_s)
    run = outcome.run
    assert run.training_s + run.checkpoints_s + run.lost_s + run.restarts_s == pytest.approx(run.total_s)
    # The run draws its steps from the simulated ones.
    assert run.training_s / run.steps == pytest.approx(outcome.mean_step_s, rel=0.01)
    assert outcome.goodput == pytest.approx(sum(outcome.shares[name] for name in outcome.parts_s))


def test_restarts_that_take_longer_than_the_machine_lasts_end_at_the_hour() -> None:
    outcome = simulate(failing_run(mtbf_hours=0.001, restart_s=3600.0, hours=24))
    assert outcome.run.steps == 0 and outcome.run.total_s == 24 * 3600
    assert outcome.run.failures > 1000
    assert outcome.goodput == outcome.expected_goodput == 0


def test_only_written_checkpoints_save_steps() -> None:
    """A failure in the middle of the first checkpoint loses all steps before it."""
    job = failing_run(mtbf_hours=1.0, hours=5.0, checkpoint_steps=10, checkpoint_s=30.0, restart_s=7.0)
    for seed in range(50):
        run = run_through(job, np.array([4.0]), seed)
        assert run.total_s == pytest.approx(run.training_s + run.checkpoints_s + run.lost_s + run.restarts_s)
        at, steps = map(np.array, zip(*run.progress, strict=True))
        for begin, end, before, after in zip(at[::2], at[1::2], steps[::2], steps[1::2], strict=True):
            gained, fits = after - before, end - begin  # from a restart to the next failure, or the end
            if end < run.total_s:
                assert gained == fits // 70 * 10
            else:
                assert gained == fits // 70 * 10 + min(fits % 70 // 4, 10)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_runs_equal_those_of_a_plain_simulation(data: st.DataObject) -> None:
    """Second by second, with whole seconds of everything but the failures."""
    draws = {
        name: data.draw(st.integers(least, 9))
        for name, least in (("checkpoint_s", 0), ("restart_s", 0), ("checkpoint_steps", 1))
    }
    job = failing_run(hours=data.draw(st.integers(1, 3)), mtbf_hours=data.draw(st.floats(0.005, 2)), **draws)
    seed = data.draw(st.integers(0, 1000))
    run = run_through(job, np.array([4.0]), seed)
    now, saved, done, failures, end = 0.0, 0, 0, 0, job.hours * 3600
    gaps = np.random.default_rng([seed, 3])
    failure = gaps.standard_exponential() * job.mtbf_hours * 3600
    todo: list[tuple[float, str]] = []
    while True:
        todo = todo or [(4.0, "step")] * job.checkpoint_steps + [(job.checkpoint_s, "save")]
        seconds, what = todo[0]
        if now + seconds > min(failure, end):
            if end <= failure:
                break
            now, done, failures, todo = failure, saved, failures + 1, [(job.restart_s, "restart")]
            failure += gaps.standard_exponential() * job.mtbf_hours * 3600
            continue
        now += seconds
        todo.pop(0)
        done += what == "step"
        saved = done if what == "save" else saved
    assert (run.steps, run.failures) == (done, failures)


# The best interval


def test_formulas_of_the_interval() -> None:
    assert young_s(50, 10_000) == 1000
    assert daly_s(50, 10_000) == pytest.approx(1000 * (1 + 0.05 / 3 + 0.0025 / 9) - 50)
    assert daly_s(500, 100) == 100
    assert young_s(1, inf) == daly_s(1, inf) == inf


@pytest.mark.parametrize(("cost", "mtbf"), [(20, 10_000), (120, 10_000), (5, 100_000)])
def test_the_best_simulated_interval_is_near_dalys(cost: float, mtbf: float) -> None:
    found = best_interval(2.0, checkpoint_s=cost, restart_s=300, mtbf_s=mtbf, seed=0)
    costs = {"checkpoint_s": cost, "restart_s": 300, "mtbf_s": mtbf}
    assert 0.7 < found.simulated_s / found.daly_s < 1.4  # the goodput is flat around its optimum
    assert found.simulated_goodput == pytest.approx(expected_goodput(found.daly_s, **costs), rel=0.01)
    worse = expected_goodput(found.daly_s * 5, **costs)
    assert worse < expected_goodput(found.daly_s, **costs)


def test_sampled_goodput_is_that_of_the_simulated_run() -> None:
    gaps = 3 * 3600 * np.random.default_rng(0).standard_exponential(20_000)
    sampled = sampled_goodput(100, gaps, step_s=4.0, checkpoint_s=20, restart_s=300)
    assert sampled == pytest.approx(simulate(failing_run(hours=30_000)).goodput, rel=0.01)


# The whole


def test_the_same_seed_gives_the_same_result() -> None:
    job = failing_run(jitter=0.1, copies=4, tensor_ranks=2, slow_ranks=1, hours=200)
    first, again, other = (json.dumps(simulate(job, seed).to_dict()) for seed in (1, 1, 2))
    assert first == again != other


def test_figures_are_json_also_without_failures() -> None:
    told = json.loads(json.dumps(simulate(failing_run(mtbf_hours=inf)).to_dict(), allow_nan=False))
    assert told["interval_s"]["young_s"] is None
    assert told["ranks"] == 1


@pytest.mark.rest
def test_thousands_of_ranks_take_seconds() -> None:
    """About one second on one core."""
    job = Job(
        SCHEDULES["1f1b"](16, 16), (Times(0.17, 0.17, 0.16, 0.002),), copies=128, tensor_ranks=8, jitter=0.03, slow_ranks=16,
        mtbf_hours=3, checkpoint_s=10, restart_s=600,
    )  # fmt: skip
    assert job.num_ranks == 16_384
    began = time.monotonic()
    outcome = simulate(job)
    assert time.monotonic() - began < 15
    assert outcome.ideal_s < outcome.with_jitter_s < outcome.mean_step_s


@pytest.mark.rest
def test_draws_a_picture(tmp_path: Path) -> None:
    for name, job in (("failing", failing_run(jitter=0.1, hours=48)), ("plain", failing_run(mtbf_hours=inf, hours=1))):
        path = tmp_path / f"{name}.svg"
        draw(simulate(job), path)
        assert path.read_text().count("<path") > 10


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"copies": 0}, "copies: expected at least 1, got 0"),
        ({"jitter": -1.0}, "jitter: expected at least 0"),
        ({"slow_ranks": 2}, "2 slow ranks of 1"),
        ({"slow_factor": 0.5}, "slow_factor"),
        ({"mtbf_hours": 0.0}, "above 0"),
        ({"steps": 0}, "steps: expected at least 1"),
        ({"times": (Times(1, 1, 1), Times(1, 1, 1))}, "expected times of 1 or 1 stages"),
        ({"times": (Times(0, 0, 0),)}, "not all 0"),
    ],
)
def test_wrong_values(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(failing_run(), **wrong)  # type: ignore[arg-type]


def test_the_command_prints_all_causes() -> None:
    parser = argparse.ArgumentParser()
    simulate_command.options(parser)
    words = "--jitter 0.05 --slow-ranks 1 --rank-mtbf-hours 64 --checkpoint-seconds 5 --restart-seconds 200 --hours 50"
    schedule = SCHEDULES["1f1b"](4, 8)
    job = simulate_command.job_of(
        parser.parse_args(words.split()), schedule, [Times(0.2, 0.2, 0.2, 0.01)], copies=4, tensor_ranks=2, reduction_s=0.1,
        optimizer_s=0.1, tokens=1000,
    )  # fmt: skip
    assert job.mtbf_hours == 2  # of 32 ranks
    console = Console(record=True, width=200, file=io.StringIO())
    simulate_command.show(simulate(job), console)
    text = console.export_text()
    assert all(name in text for name in CAUSES)
    assert "32 ranks" in text and "(Young)" in text and "goodput" in text
