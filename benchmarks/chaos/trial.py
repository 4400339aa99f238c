"""One trial: starts a job, harms it, and judges what became of it."""

import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.chaos.cases import Case
from benchmarks.chaos.verdicts import Facts, Outcome
from mpitrain.job.elastic.copies.holding import remove_all
from mpitrain.job.elastic.lease import read_lease
from mpitrain.tools.bench.jobs.job import BenchJob, OwnHarm

_START_S, _END_S = 120.0, 240.0


def attempt(
    case: Case,
    seed: int,
    command: Sequence[str],
    env: Mapping[str, str],
    reference: Mapping[int, float],
    room: Path,
) -> Outcome | None:
    """Make a trial in the folder `room`. None: the harm came too late. `reference`: the losses of an undisturbed run."""
    run = _folder(case, room)
    shutil.rmtree(run, ignore_errors=True)
    outcome, rng = Outcome(case.name, seed, ok=False), random.Random(seed)
    own = None
    if case.fault:
        own = OwnHarm(
            case.fault, rng.randrange(case.num_ranks), rng.randint(2, case.num_steps - 1), rng.randrange(1 << 31)
        )
    job = BenchJob(command, {**env, **case.env}, case.settings, run, own, case.module)
    jobs = [job]

    def start() -> tuple[BenchJob, int | None]:
        jobs.append(BenchJob(command, {**env, **case.env}, case.settings, run))
        return jobs[-1], jobs[-1].end(_START_S + case.seconds)

    try:
        if not job.wait_for_first_step(_START_S):
            outcome.problem = "the job did not start"
        else:
            harmed = case.harm(job, rng)
            code = job.end(_END_S + case.seconds)
            if harmed is not None and harmed.step < case.num_steps:
                outcome.problem = case.verdict(Facts(job, code, harmed, reference, start), outcome)
            elif harmed is not None or code == 0:
                return None
            else:
                outcome.problem = f"before the harm, the job ended by itself with exit code {code}"
    finally:
        for each in jobs:
            each.kill()
        if (lease := read_lease(run)) is not None:
            remove_all(lease.run)
    outcome.ok = not outcome.problem
    if outcome.problem:
        (room / f"{case.name}-{seed}.txt").write_text(f"{outcome.problem}\n{jobs[0].output}")
    return outcome


def losses_of(case: Case, command: Sequence[str], env: Mapping[str, str], room: Path) -> dict[int, float]:
    """The losses of an undisturbed run in the folder `room`. RuntimeError if it fails."""
    run = _folder(case, room)
    shutil.rmtree(run, ignore_errors=True)
    job = BenchJob(command, {**env, **case.env}, case.settings, run)
    try:
        if (code := job.end(_START_S + _END_S + case.seconds)) != 0:
            raise RuntimeError(f"an undisturbed run ended with exit code {code}:\n{job.output}")
    finally:
        job.kill()
    return job.steps()


def _folder(case: Case, room: Path) -> Path:
    """The folder of a job, on a small disk where the case has one."""
    return room / "disk/run" if case.disk_bytes else room / "run"
