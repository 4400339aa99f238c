"""One kill of a contestant, and the times until its next steps."""

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.recovery.contestants import EVERY, RANKS, TORCHFT, Size, ranks_of, start
from mpitrain.job.elastic.copies.holding import remove_all
from mpitrain.job.elastic.lease import read_lease
from mpitrain.tools.bench.jobs.job import BenchJob

START_S, RECOVER_S = 180.0, 120.0
_LOOK_S = 0.002
_AT = 2 * EVERY - 1  # the kill follows this step: the optimizer's state, the copies and the first save are there


class TrialError(RuntimeError):
    """A contestant did not start or did not recover; the text has its output."""


class _LateError(Exception):
    """The job had saved its next state before the kill."""


def trial(name: str, size: Size, run: Path) -> dict[str, Any]:
    """As `_trial`. A kill that came too late is repeated, at most twice."""
    for _ in range(3):
        with contextlib.suppress(_LateError):
            return _trial(name, size, run)
    raise TrialError(
        f"{name}: three kills after step {_AT} came after the save of step {2 * EVERY}; use a larger model"
    )


def _trial(name: str, size: Size, run: Path) -> dict[str, Any]:
    """Kill a rank of a contestant; returns the seconds to its next step and to the step of the kill."""
    shutil.rmtree(run, ignore_errors=True)
    job = start(name, size, run)
    try:
        _wait(job, lambda: job.run.exists() and _last_step(job) >= _AT - 4, START_S, "its first steps")
        ranks = ranks_of(name, job)
        if len(ranks) != RANKS:
            raise TrialError(f"{name}: expected {RANKS} ranks, found {ranks}\n{job.output}")
        _wait(job, lambda: _last_step(job) >= _AT, START_S, f"step {_AT}")
        os.kill(ranks[RANKS - 1], signal.SIGKILL)
        killed = time.monotonic()
        goes_back, seen = name != TORCHFT, list[int]()

        def goes_on() -> bool:
            step = _last_step(job)
            seen.append(step)
            if goes_back and step > 2 * EVERY:
                raise _LateError
            return EVERY < step < _AT if goes_back else _num_replicas(job) == 1

        _wait(job, goes_on, RECOVER_S, "the next step")
        next_s, first = time.monotonic() - killed, seen[-1]
        if goes_back:
            _wait(job, lambda: _last_step(job) >= _AT, RECOVER_S, f"step {_AT} again")
        else:
            _wait(job, lambda: _num_replicas(job) == RANKS, RECOVER_S, "a step with all replicas")
        return {"next_s": next_s, "caught_up_s": time.monotonic() - killed, "first_step": first, "killed_after": _AT}
    finally:
        job.kill()
        if (lease := read_lease(run)) is not None:
            remove_all(lease.run)


def _wait(job: BenchJob, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    if not job.wait_until(condition, timeout_s, every_s=_LOOK_S):
        raise TrialError(f"the job did not come to {what} within {timeout_s:g} s:\n{job.output[-4000:]}")


def _last_step(job: BenchJob) -> int:
    """The step of the last complete line of the metrics."""
    return int(_last_line(job).get("step", 0))


def _num_replicas(job: BenchJob) -> int:
    """The replicas of torchft that took part in the last step."""
    return int(_last_line(job).get("replicas", 0))


def _last_line(job: BenchJob) -> dict[str, Any]:
    try:
        lines = (job.run / "metrics.jsonl").read_bytes().rpartition(b"\n")[0].splitlines()
    except OSError:
        return {}
    return dict(json.loads(lines[-1])) if lines else {}
