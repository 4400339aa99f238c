"""The times of steps. The program of one pipeline is walked once, and each time is an array over steps and copies of the pipeline."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mpitrain.stages.schedules import Action, Schedule, Times
from mpitrain.stages.schedules.timeline import timeline
from mpitrain.tools.plan.simulation.job import Job


class SlowRanks(NamedTuple):
    """Where the slow ranks of one rank of the pipeline are."""

    copies: np.ndarray
    """int (n,): the copies with a slow rank in the tensor group."""
    is_slow: np.ndarray
    """bool (n, tensor ranks)."""


class Disturbed(NamedTuple):
    """Which disturbances a simulation of steps includes. The draws are the same with and without them."""

    jitter: float
    slow_factor: float


def slow_places(job: Job, seed: int) -> list[SlowRanks]:
    """The slow ranks, drawn at random, by rank of the pipeline."""
    shape = (job.schedule.num_ranks, job.copies, job.tensor_ranks)
    is_slow = np.zeros(shape, bool)
    drawn = np.random.default_rng([seed, 0]).choice(job.num_ranks, job.slow_ranks, replace=False)
    is_slow.reshape(-1)[drawn] = True
    copies = [np.flatnonzero(of_rank.any(1)) for of_rank in is_slow]
    return [SlowRanks(chosen, of_rank[chosen]) for chosen, of_rank in zip(copies, is_slow, strict=True)]


def pipeline_seconds(job: Job, places: list[SlowRanks], disturbed: Disturbed, *, steps: int, seed: int) -> np.ndarray:
    """Seconds of `steps` steps from the first forward to the end of the last action of all copies: float64 (steps,).

    An action begins as soon as its rank has ended the one before, and has what it needs, as in `timeline`.
    """
    schedule, random = job.schedule, np.random.default_rng([seed, 1])
    num_copies = job.copies if disturbed.jitter else 1 if disturbed.slow_factor == 1 else job.copies
    free = np.zeros((schedule.num_ranks, steps, num_copies))
    results: dict[tuple[str, int, int], np.ndarray] = {}  # when a result is there, until it is used
    for rank, action, needed in in_possible_order(schedule):
        times = job.of_stage(action.stage)
        if needed is not None:
            there = results.pop(needed)
            if schedule.rank_of(needed[1]) != rank:
                there = there + job.of_stage(needed[1]).message
            np.maximum(free[rank], there, out=free[rank])
        longer = _times_as_long(job, places[rank], disturbed, free[rank].shape, random)
        free[rank] += times.of(action.kind, 1) * longer
        if action.kind == "F" or (action.kind != "W" and action.stage):
            results[_result(action)] = free[rank].copy()
    return free.max(axis=(0, 2))


def _times_as_long(
    job: Job, place: SlowRanks, disturbed: Disturbed, shape: tuple[int, ...], random: np.random.Generator
) -> np.ndarray | float:
    """How many times as long each tensor group takes for an action: as its slowest rank. () or (steps, copies)."""
    jitter, slow_factor = disturbed
    if not jitter:
        if slow_factor == 1 or not len(place.copies):
            return 1.0
        longer = np.ones(shape)
        longer[:, place.copies] = slow_factor
        return longer
    longer = random.standard_exponential(shape)
    if job.tensor_ranks > 1:
        # The largest of n exponential values has one draw: -log(1 - U^(1/n)) with U = exp(-X), and X is exponential as well.
        longer /= -job.tensor_ranks
        np.expm1(longer, out=longer)
        np.negative(longer, out=longer)
        np.log(longer, out=longer)
        longer *= -jitter
    else:
        longer *= jitter
    longer += 1
    if len(place.copies):
        speeds = np.where(place.is_slow, slow_factor, 1.0)
        each = 1 + jitter * random.standard_exponential((shape[0], *speeds.shape))
        longer[:, place.copies] = (speeds * each).max(axis=2)
    return longer


def in_possible_order(schedule: Schedule) -> Iterator[tuple[int, Action, tuple[str, int, int] | None]]:
    """(rank, action, the result that it needs from another action) of all ranks. Each action comes after the ones that it needs."""
    run = timeline(
        schedule, Times()
    )  # in which all actions take time, so an action begins later than those that it needs
    by_start = sorted((begun, rank, at) for rank, starts in enumerate(run.begun) for at, begun in enumerate(starts))
    for _, rank, at in by_start:
        action = run.programs[rank][at]
        yield rank, action, _needed(action, schedule.num_stages - 1)


def _needed(action: Action, last: int) -> tuple[str, int, int] | None:
    kind, stage, micro = action
    if kind == "W" or (kind == "F" and stage == 0):
        return None
    if kind == "F":
        return "F", stage - 1, micro
    return ("F", stage, micro) if stage == last else ("B", stage + 1, micro)


def _result(action: Action) -> tuple[str, int, int]:
    return "F" if action.kind == "F" else "B", action.stage, action.micro
