"""The time limits of a launch, one for each phase. Pure: the times come from the caller."""

import math
import os
from collections.abc import Hashable
from dataclasses import dataclass, field

from mpitrain.job.record.files.marks import Alive


def _of_steps() -> float:
    """Longer than the ranks' own limit: they end a hang themselves, with a report that names the rank."""
    word = os.environ.get("MPITRAIN_DEADLINE_S", "")
    try:
        deadline_s = float(word)
    except ValueError:
        deadline_s = 600.0
    return deadline_s + 30 if deadline_s else math.inf  # 0: the ranks have no deadline


@dataclass(frozen=True)
class PhaseLimits:
    """Seconds that each phase may take. A phase without a sign of life for longer is a hang, and the launch is ended."""

    launch_s: float = 60.0
    """from mpirun's start to the first mark of rank 0, before its imports; twice as long after each launch that took longer"""
    start_s: float = 600.0
    """from there to the first step: imports, the model, reading a checkpoint"""
    step_s: float = field(default_factory=_of_steps)
    """from one sign of life to the next while the run trains or evaluates (default: MPITRAIN_DEADLINE_S + 30)"""
    save_s: float = 1800.0
    """one save"""
    recover_s: float = 120.0
    """a recovery in place"""
    report_s: float = 3.0
    """from a report of a failure to the end of the job, to a further report, or to the next sign of life"""
    done_s: float = 12.0
    """from the mark of completion to the end of the job"""
    end_s: float = 5.0
    """mpirun's end after SIGTERM; then it is killed"""
    probe_s: float = 5.0
    """the answer of a host"""
    hosts_s: float = 600.0
    """the answers of as many hosts as a launch needs"""


class LaunchWatch:
    """Watches the signs of life of one launch."""

    def __init__(self, limits: PhaseLimits, launch: int, now: float) -> None:
        self._limits, self._launch = limits, launch
        self._sign: Hashable = None
        self._report: Hashable = None
        self._first: int | None = None  # the step from which this launch goes on
        self._since, self._is_reported, self._is_done = now, False, False
        self.alive: Alive | None = None
        """The last sign of life of this launch."""
        self.trains = False
        """Whether this launch has done a step."""

    def see(self, now: float, sign: Hashable, alive: Alive | None, report: Hashable, *, is_done: bool = False) -> str:
        """Take in the marks as they are now; returns what stands still for too long, or "".

        `sign` changes with each sign of life. `report` changes with each report of a failure. A sign of life after a report means that
        the run goes on in place; without one the job must end soon. `is_done`: the job has left its mark of completion.
        """
        if alive is not None and alive.launch == self._launch and sign != self._sign:
            self._sign, self._since, self._is_reported, self.alive = sign, now, False, alive
            if alive.phase == "training":
                self._first = alive.step if self._first is None else self._first
                self.trains = self.trains or alive.step > self._first
        if report != self._report:
            self._report = report
            if report is not None:
                self._since, self._is_reported = now, True
        if is_done and not self._is_done:
            self._since, self._is_done = now, True
        limit_s, what = self._limit()
        return f"{what} within {limit_s:g} s" if now - self._since > limit_s else ""

    def _limit(self) -> tuple[float, str]:
        limits, alive = self._limits, self.alive
        if self._is_done:
            return limits.done_s, "the run is complete, and the job has not ended"
        if self._is_reported:
            recovers = alive is not None and alive.phase == "recovering"
            return max(
                limits.report_s, limits.recover_s * recovers
            ), "a failure was reported, and the job has not ended"
        if alive is None:
            return limits.launch_s, "no rank has started"
        match alive.phase:
            case "starting":
                return limits.start_s, "the run has not come to its first step"
            case "saving":
                return limits.save_s, f"the save after step {alive.step} has not ended"
            case "recovering":
                return limits.recover_s, f"the recovery after step {alive.step} has not ended"
        return limits.step_s, f"there was no sign of life after step {alive.step}"
