"""What follows the end of a launch. Pure: a function of what is known."""

from typing import Literal, NamedTuple

from mpitrain.job.record.files.marks import Done


class Policy(NamedTuple):
    """How often a job is started again, and after which pauses."""

    max_relaunches: int = 10
    """in a row, without a step that no earlier launch had done"""
    pause_s: float = 1.0
    """before the second relaunch in a row; the first follows at once, and each further pause is twice as long"""
    max_pause_s: float = 60.0

    def pause(self, failures: int) -> float:
        """The pause after so many failures in a row."""
        return 0.0 if failures <= 1 else min(self.max_pause_s, self.pause_s * 2.0 ** min(failures - 2, 30))


class LaunchProgress(NamedTuple):
    """The launches so far: failures since the last new step, and the greatest step."""

    failures: int = 0
    best_step: int = 0


class LaunchOutcome(NamedTuple):
    """How a launch ended. `step`: the last one that was seen. `stop`: who asked it to save and stop; "batch": nobody did, but the batch
    system ends the job. `problem`: why it failed.

    `is_reduced`: it had fewer hosts than the job may have, or had lost ranks.
    """

    done: Done | None
    step: int
    stop: Literal["", "user", "rejoin", "batch"] = ""
    problem: str = "the job ended without its mark of completion"
    is_reduced: bool = False

    def does_not_fit(self, progress: "LaunchProgress") -> bool:
        """Whether the settings fit the job, as earlier steps show, but not the ranks that are left."""
        return self.done is not None and self.done.reason == "refused" and self.is_reduced and progress.best_step > 0


class Next(NamedTuple):
    """What to do: start again after a pause, or end with an exit code. `text`: the line that says so."""

    action: Literal["launch", "end"]
    text: str
    progress: LaunchProgress
    pause_s: float = 0.0
    code: int = 0


def decide(policy: Policy, progress: LaunchProgress, outcome: LaunchOutcome) -> Next:
    """The next action. Only a mark of completion ends with exit code 0."""
    done = outcome.done
    step = max(outcome.step, done.step if done is not None else 0)
    best = LaunchProgress(0 if step > progress.best_step else progress.failures, max(step, progress.best_step))
    problem = outcome.problem
    if outcome.does_not_fit(best):
        done, problem = None, "the settings do not fit the ranks that are left"
    if done is not None and done.reason == "finished":
        return Next("end", f"the run is finished after step {done.step}", best)
    if done is not None and done.reason == "refused":
        return Next("end", "these settings are refused, and a relaunch would not change that", best, code=1)
    if done is not None and outcome.stop == "rejoin":
        return Next("launch", f"saved and stopped after step {done.step} so that hosts rejoin", best)
    if done is not None:
        return Next("end", f"saved and stopped after step {done.step}; the same command goes on from there", best)
    if outcome.stop == "batch":
        return Next("end", f"{problem}; the next job goes on from the run's newest complete state", best, code=1)
    if outcome.stop == "user":
        return Next("end", f"{problem}; no relaunch, as a stop was asked for", best, code=1)
    now = LaunchProgress(best.failures + 1, best.best_step)
    if now.failures > policy.max_relaunches:
        times = f"{policy.max_relaunches} relaunch{'es' * (policy.max_relaunches != 1)}"
        return Next("end", f"{problem}; giving up after {times} without a new step", now, code=1)
    pause_s = policy.pause(now.failures)
    when = f"in {pause_s:g} s" if pause_s else "now"
    text = f"{problem}; relaunch {now.failures} of at most {policy.max_relaunches} {when}"
    return Next("launch", text, now, pause_s)
