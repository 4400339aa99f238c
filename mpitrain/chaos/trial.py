"""One trial: starts a job, harms it, and judges how it went on."""

import datetime
import math
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from collectives.transports.node.memory import folder
from mpitrain.chaos.job import Job
from mpitrain.elastic.copies.files import prefix
from mpitrain.elastic.lease import read_lease

_TOLERANCE = 1e-5
"""Relative, of the losses of the ten steps from a recovery on: fewer ranks add in another order."""
_LATER = 1e-3  # of later losses, because the differences grow while the model trains
_NUM_CLOSE = 10
_START_S, _END_S = 120.0, 120.0


class Outcome(msgspec.Struct):
    """The result of a trial. Times are seconds; None: the trial has none."""

    case: str
    seed: int
    ok: bool
    problem: str = ""
    detected_s: float | None = None  # from the harm to the notice of a rank
    recovered_s: float | None = None  # from the notice to the end of the first step after it
    repeated: int | None = None  # steps that were done again


class Harm(NamedTuple):
    """What was done to a job: the time of the last blow, and the number of steps done before."""

    at: float
    step: int


Harmer = Callable[[Job, random.Random], Harm | None]
"""Harms a job between its first and its last step. None: the job ended too early."""


def attempt(
    case: str,
    seed: int,
    command: Sequence[str],
    env: Mapping[str, str],
    words: Sequence[str],
    harm: Harmer,
    reference: Mapping[int, float],
    run: Path,
    *,
    max_repeated: int,
) -> Outcome:
    """Make a trial in the folder `run`. `reference`: the losses of an undisturbed run, by step."""
    shutil.rmtree(run, ignore_errors=True)
    outcome = Outcome(case, seed, ok=False)
    job = Job(command, env, words, run)
    try:
        if not job.wait_for_step(1, _START_S):
            outcome.problem = "the job did not start"
        elif (harmed := harm(job, random.Random(seed))) is None:
            outcome.problem = "the job ended before it was harmed"
        else:
            code = job.end(_END_S)
            outcome.problem = _problem(job, code, reference)
            _measure(outcome, job, harmed)
            if not outcome.problem and (outcome.repeated or 0) > max_repeated:
                outcome.problem = f"{outcome.repeated} steps were done again; expected at most {max_repeated}"
    finally:
        if job.process.poll() is None:
            job.kill()
    outcome.ok = not outcome.problem
    if outcome.problem:
        (run.parent / f"{case}-{seed}.txt").write_text(f"{outcome.problem}\n{job.output}")
    return outcome


def losses_of(command: Sequence[str], env: Mapping[str, str], words: Sequence[str], run: Path) -> dict[int, float]:
    """The losses of an undisturbed run. RuntimeError if it fails."""
    shutil.rmtree(run, ignore_errors=True)
    job = Job(command, env, words, run)
    if (code := job.end(_START_S + _END_S)) != 0:
        raise RuntimeError(f"an undisturbed run ended with exit code {code}:\n{job.output}")
    return job.steps()


def _problem(job: Job, code: int | None, reference: Mapping[int, float]) -> str:
    """What is wrong with a job that has ended; "" if nothing is."""
    if code is None:
        return "the job stood still"
    if code != 0:
        return f"the job ended with exit code {code}"
    steps = job.steps()
    if missing := sorted(set(reference) - set(steps)):
        return f"steps {missing[:5]} are not in the metrics"
    restored = [event["step"] for event in job.events("restore")]
    if not restored:
        return "no recovery took place"
    for step, loss in reference.items():
        is_close = step < min(restored, default=0) or any(0 <= step - first < _NUM_CLOSE for first in restored)
        if not math.isclose(steps[step], loss, rel_tol=_TOLERANCE if is_close else _LATER):
            return f"the loss of step {step} is {steps[step]}; undisturbed it is {loss}"
    if left := job.left():
        return f"processes {left} are left"
    lease = read_lease(job.run)
    if lease is not None and (copies := [path.name for path in folder().glob(f"{prefix(lease.run)}*")]):
        return f"{copies} are left in node memory"
    return ""


def _measure(outcome: Outcome, job: Job, harmed: Harm) -> None:
    """Note the times of the recovery that followed the last blow."""
    restored = [event for event in job.events("restore") if _seconds(event["time"]) > harmed.at]
    if restored:
        last = restored[-1]
        outcome.recovered_s = last["cost_s"]
        outcome.detected_s = round(_seconds(last["time"]) - last["cost_s"] - harmed.at, 3)
        outcome.repeated = max(harmed.step - (last["step"] - 1), 0)


def _seconds(time_: str) -> float:
    return datetime.datetime.fromisoformat(time_).timestamp()


# The ways to harm a job


def kill(job: Job, pick: Sequence[int], how: int = signal.SIGKILL) -> Harm:
    """Send a signal to ranks of MPI_COMM_WORLD."""
    there = job.ranks()
    step, now = max(job.steps(), default=0), time.time()
    for rank in pick:
        with suppress(ProcessLookupError, KeyError):
            os.kill(there[rank], how)
    return Harm(now, step)


def at_random(num_ranks: int, seconds: float, *, victim: int | None = None, pause_s: float | None = None) -> Harmer:
    """Kills a rank at a random moment of the first `seconds` after the first step. `victim`: this one.

    `pause_s`: kills another rank after a random pause of at most so many seconds.
    """

    def harm(job: Job, rng: random.Random) -> Harm | None:
        time.sleep(rng.uniform(0.0, seconds))
        first = rng.randrange(num_ranks) if victim is None else victim
        if job.process.poll() is not None or len(job.ranks()) < num_ranks:
            return None
        harmed = kill(job, [first])
        if pause_s is not None:
            time.sleep(rng.uniform(0.0, pause_s))
            other = rng.choice([rank for rank in range(num_ranks) if rank != first])
            harmed = Harm(kill(job, [other]).at, harmed.step)
        return harmed

    return harm


def when(condition: Callable[[Job], bool], num_ranks: int, within_s: float) -> Harmer:
    """Kills a random rank at most `within_s` after a condition has become true for the first time."""

    def harm(job: Job, rng: random.Random) -> Harm | None:
        deadline = time.monotonic() + _END_S
        while not condition(job):
            if job.process.poll() is not None or time.monotonic() > deadline:
                return None
            time.sleep(0.001)
        time.sleep(rng.uniform(0.0, within_s))
        return kill(job, [rng.randrange(num_ranks)])

    return harm


def is_saving(job: Job) -> bool:
    """Whether a save is under way."""
    return any(job.run.glob("checkpoints/.step-*.staging"))


def is_evaluating(job: Job) -> bool:
    """Whether the step before an evaluation is done, and the evaluation is not."""
    data = (job.run / "metrics.jsonl").read_bytes() if (job.run / "metrics.jsonl").exists() else b""
    return max(job.steps(), default=0) == 10 and b"heldout_loss" not in data
