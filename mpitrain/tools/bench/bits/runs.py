"""One run: how it is started, and what differs from another run."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from mpitrain.job.elastic.copies.holding import remove_all
from mpitrain.job.elastic.lease import read_lease
from mpitrain.tools.bench.jobs import checkout
from mpitrain.tools.bench.jobs.job import BenchJob, OwnHarm
from mpitrain.view.diff import checkpoints, metrics, printing
from mpitrain.view.reading.run import read_run

Launch = tuple[tuple[str, ...], dict[str, str]]
"""The command that starts a job, and its environment."""


class FailedError(RuntimeError):
    """A job did not do what was expected. The text is one line."""


def launch(num_ranks: int, *, launcher: Sequence[str] = (), hosts: int = 1, elastic: bool = False) -> Launch:
    """How a job is started: by the user's launcher, such as `mpirun -H a,b` or `srun`, or by the checkout's mpirun.

    `hosts`: if several, they are made on this machine. `elastic`: the job survives the loss of a rank.
    """
    if hosts > 1:
        return checkout.cluster(hosts, num_ranks // hosts, elastic=elastic)
    if launcher:
        return (*launcher, "-n", str(num_ranks)), dict(os.environ)
    return checkout.mpirun(num_ranks, elastic=elastic)


def train(run: Path, started_by: Launch, settings: Sequence[str], timeout_s: float, kill: OwnHarm | None) -> float:
    """Train in the new folder `run`; returns the seconds. `kill`: the last rank dies, and the others go on.

    FailedError; then `run`.txt has the output of the job.
    """
    began = time.monotonic()
    job = BenchJob(*started_by, settings, run, kill)
    try:
        code = job.end(timeout_s)
        problem = f"not ended after {timeout_s:g} s" if code is None else f"exit code {code}" if code else ""
        if not problem and kill is not None and [event["ranks"] for event in job.events("shrink")] != [kill.rank]:
            problem = "the other ranks did not go on in place"
        if problem:
            output = run.with_name(f"{run.name}.txt")
            output.write_text(job.output)
            said = [line for line in job.output.splitlines() if "error:" in line]
            raise FailedError(f"{problem}{': ' * bool(said)}{said[0] if said else ''}; the output is in {output}")
    finally:
        job.kill()
        if (lease := read_lease(run)) is not None:
            remove_all(lease.run)
    return time.monotonic() - began


def difference(reference: Path, run: Path, *, first: int, last: int) -> str:
    """The first step and the first tensor that differ in the steps `first` to `last` and the last checkpoint; "" for the same bits.

    FailedError if the run lacks a step or the checkpoint.
    """
    a, b = read_run(reference), read_run(run)
    of_steps = metrics.compare(a, b, None)
    compared, _ = checkpoints.compare_runs(a.folder, b.folder, None)
    if b.steps.step.tolist() != list(range(first, last + 1)) or not compared:
        raise FailedError(f"{run} lacks the last checkpoint, or one of the steps {first} to {last}")
    return "; ".join(printing.verdicts(of_steps, compared))
