"""A long run: steps, checkpoints, failures and restarts, one after the other."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mpitrain.tools.plan.simulation.job import Job

_CHUNK = 1 << 14  # steps that are drawn at once


class RunTimes(NamedTuple):
    """What became of the time of a run, in seconds. The parts add up to `total_s`."""

    total_s: float
    training_s: float
    """Of steps that are not lost."""
    checkpoints_s: float
    lost_s: float
    """Of steps and checkpoints after the last whole checkpoint before a failure."""
    restarts_s: float
    steps: int
    """That are not lost."""
    lost_steps: int
    failures: int
    progress: tuple[tuple[float, int], ...]
    """(seconds since the start, steps that are not lost) at the start, at each failure, at the end of each restart, and at the end."""


def run_through(job: Job, step_s: np.ndarray, seed: int) -> RunTimes:
    """Simulate the run. The time of each step is drawn from `step_s`, float64 (n,).

    The end of the run loses nothing, because a run writes a checkpoint when it ends.
    """
    random = np.random.default_rng([seed, 2])
    failures = failure_times(job.mtbf_hours * 3600, np.random.default_rng([seed, 3]))
    end, now, next_failure = job.hours * 3600, 0.0, next(failures)
    steps = lost_steps = num_failures = 0
    parts = dict.fromkeys(("training_s", "checkpoints_s", "lost_s", "restarts_s"), 0.0)
    progress = [(0.0, 0)]
    while True:
        limit = min(next_failure, end)
        left = None if job.steps is None else job.steps - steps
        ends = _ends_of_steps(job, step_s, limit - now, left, random)
        done = len(ends)
        if limit == end or done == left:
            # The time of a step that the end cuts off is not lost either, but it has no use: it counts as lost.
            before = job.checkpoint_s * ((done - 1) // job.checkpoint_steps) if done else 0.0
            took = float(ends[-1]) if done else 0.0
            parts["training_s"] += took - before
            parts["checkpoints_s"] += before
            total = now + took if done == left else end
            parts["lost_s"] += total - now - took
            steps += done
            progress.append((total, steps))
            return RunTimes(
                total, **parts, steps=steps, lost_steps=lost_steps, failures=num_failures, progress=tuple(progress)
            )
        # A checkpoint counts once it is written, also if the failure hits before the next step ends.
        saved = done // job.checkpoint_steps
        if saved and saved * job.checkpoint_steps == done and now + ends[-1] + job.checkpoint_s > limit:
            saved -= 1
        kept = saved * job.checkpoint_steps
        until = float(ends[kept - 1]) + job.checkpoint_s if kept else 0.0
        parts["training_s"] += until - saved * job.checkpoint_s
        parts["checkpoints_s"] += saved * job.checkpoint_s
        parts["lost_s"] += limit - now - until
        steps += kept
        lost_steps += done - kept
        progress.append((limit, steps))
        restarted, num_failures = next_failure + job.restart_s, num_failures + 1
        now = next_failure
        while (next_failure := next(failures)) < min(restarted, end):
            restarted, num_failures = next_failure + job.restart_s, num_failures + 1
        parts["restarts_s"] += min(restarted, end) - now
        now = min(restarted, end)
        progress.append((now, steps))


def failure_times(mtbf_s: float, random: np.random.Generator) -> Iterator[float]:
    """Seconds since the start, for ever."""
    now = 0.0
    while True:
        now += mtbf_s * random.standard_exponential()
        yield now


def _ends_of_steps(
    job: Job, step_s: np.ndarray, limit_s: float, most: int | None, random: np.random.Generator
) -> np.ndarray:
    """When each step ends that ends within `limit_s` seconds, with the checkpoints in between; at most `most` steps."""
    chunks: list[np.ndarray] = []
    begin, num = 0.0, 0
    while begin < limit_s and (most is None or num < most):
        # A few more than will fit, but no more than needed.
        count = min(_CHUNK, max(16, int(1.1 * (limit_s - begin) / step_s.min()) + 1))
        if most is not None:
            count = min(count, most - num)
        seconds = random.choice(step_s, count)
        seconds[-num % job.checkpoint_steps :: job.checkpoint_steps] += job.checkpoint_s
        if num == 0:
            seconds[0] -= job.checkpoint_s  # before the first step there is nothing to save
        ends = begin + np.cumsum(seconds)
        chunks.append(ends[: np.searchsorted(ends, limit_s, side="right")])
        begin, num = float(ends[-1]), num + count
    return np.concatenate(chunks) if chunks else np.empty(0)
