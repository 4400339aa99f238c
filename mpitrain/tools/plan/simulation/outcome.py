"""`simulate`, and what it returns."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpitrain.tools.plan.simulation.interval import Interval, best_interval, expected_goodput
from mpitrain.tools.plan.simulation.job import Job
from mpitrain.tools.plan.simulation.run import RunTimes, run_through
from mpitrain.tools.plan.simulation.steps import Disturbed, pipeline_seconds, slow_places

_VALUES = 1 << 25  # that a simulation of steps draws, in about a second
_LEAST_STEPS, _MOST_STEPS = 16, 512

CAUSES: Mapping[str, str] = {
    "work": "computation, without jitter",
    "bubble": "waiting of the schedule itself, and for stages that take longer",
    "messages": "waiting for messages between stages",
    "slow ranks": "waiting for the slow ranks",
    "own jitter": "the jitter of a rank's own actions",
    "waiting for jitter": "waiting for other ranks' jitter",
    "reduction": "the reduction of gradients after the backwards",
    "optimizer": "the optimizer",
    "checkpoints": "writing checkpoints",
    "lost": "steps since the last checkpoint before a failure",
    "restarts": "from failures until the first step after them",
}
"""Where the time of a run goes, with what each means."""


@dataclass(frozen=True)
class Outcome:
    """The result of a simulation."""

    job: Job
    step_s: np.ndarray
    """Of the simulated steps with all disturbances, float64 (n,)."""
    ideal_s: float
    """A step without jitter and slow ranks."""
    with_jitter_s: float
    """The mean step with jitter alone."""
    with_slow_s: float
    """A step with the slow ranks alone."""
    parts_s: Mapping[str, float]
    """Of the mean step and the mean rank, by the CAUSES of a step. The sum is the mean of `step_s`."""
    run: RunTimes
    interval: Interval
    expected_goodput: float
    """Daly's formula for this job's checkpoints and failures."""

    @property
    def mean_step_s(self) -> float:
        return float(self.step_s.mean())

    @property
    def goodput(self) -> float:
        """The share of the run's time that goes into steps that are not lost."""
        return self.run.training_s / self.run.total_s

    @property
    def tokens_per_s(self) -> float:
        """Of steps that are not lost, over the whole run."""
        return self.run.steps * self.job.tokens / self.run.total_s

    @property
    def shares(self) -> dict[str, float]:
        """Of the run's time by CAUSES. The sum is 1."""
        run = self.run
        of_steps = {name: part * run.training_s / self.mean_step_s for name, part in self.parts_s.items()}
        around = {"checkpoints": run.checkpoints_s, "lost": run.lost_s, "restarts": run.restarts_s}
        return {name: seconds / run.total_s for name, seconds in (of_steps | around).items()}

    def to_dict(self) -> dict[str, Any]:
        """All figures as JSON values. Infinite ones are None."""
        low, median, high = np.quantile(self.step_s, (0.01, 0.5, 0.99)).tolist()
        run = self.run._asdict()
        del run["progress"]
        return {
            "ranks": self.job.num_ranks,
            "schedule": self.job.schedule.name,
            "simulated_steps": len(self.step_s),
            "step_s": {"mean": self.mean_step_s, "median": median, "quantile_0.01": low, "quantile_0.99": high},
            "ideal_step_s": self.ideal_s,
            "step_with_jitter_s": self.with_jitter_s,
            "step_with_slow_ranks_s": self.with_slow_s,
            "step_parts_s": dict(self.parts_s),
            "run": run,
            "shares": self.shares,
            "goodput": self.goodput,
            "expected_goodput": self.expected_goodput,
            "tokens_per_s": self.tokens_per_s,
            "interval_s": {
                name: value if np.isfinite(value) else None for name, value in self.interval._asdict().items()
            },
        }


def simulate(job: Job, seed: int = 0) -> Outcome:
    """Simulate steps with and without each disturbance, then the whole run. The same seed gives the same result.

    Some hundreds of steps are simulated action by action, fewer if they have very many actions. The run draws the time of each of its
    steps from these.
    """
    places = slow_places(job, seed)
    fixed = job.reduction_s + job.optimizer_s
    jitter, slow = job.jitter, job.slow_factor if job.slow_ranks else 1.0
    num_actions = sum(len(job.schedule.program(rank)) for rank in range(job.schedule.num_ranks))
    most = min(max(_VALUES // (num_actions * job.copies), _LEAST_STEPS), _MOST_STEPS)

    def steps_of(job: Job, jitter: float, slow_factor: float) -> np.ndarray:
        disturbed = Disturbed(jitter, slow_factor)
        return fixed + pipeline_seconds(job, places, disturbed, steps=most if jitter else 1, seed=seed)

    ideal = float(steps_of(job, 0.0, 1.0)[0])
    with_slow = float(steps_of(job, 0.0, slow)[0])
    with_jitter = steps_of(job, jitter, 1.0)
    both = with_jitter if slow == 1.0 else steps_of(job, jitter, slow)
    no_messages = float(steps_of(_without_messages(job), 0.0, 1.0)[0])
    own_jitter = jitter * job.work_s
    parts = {
        "work": job.work_s,
        "bubble": no_messages - fixed - job.work_s,
        "messages": ideal - no_messages,
        "slow ranks": float(both.mean() - with_jitter.mean()),
        "own jitter": own_jitter,
        "waiting for jitter": float(with_jitter.mean()) - ideal - own_jitter,
        "reduction": job.reduction_s,
        "optimizer": job.optimizer_s,
    }
    mean, mtbf_s = float(both.mean()), job.mtbf_hours * 3600
    costs = {"checkpoint_s": job.checkpoint_s, "restart_s": job.restart_s, "mtbf_s": mtbf_s}
    return Outcome(
        job=job,
        step_s=both,
        ideal_s=ideal,
        with_jitter_s=float(with_jitter.mean()),
        with_slow_s=with_slow,
        parts_s=parts,
        run=run_through(job, both, seed),
        interval=best_interval(mean, **costs, seed=seed),
        expected_goodput=expected_goodput(job.checkpoint_steps * mean, **costs),
    )


def _without_messages(job: Job) -> Job:
    return replace(job, times=tuple(times._replace(message=0.0) for times in job.times))
