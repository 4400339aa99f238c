"""Where the time of a step goes on this rank: data, forward, backward, optimizer, checks and communication."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

PHASES = ("data", "forward", "backward", "optimizer", "check")


class Lap(NamedTuple):
    """A part of a step. Times are those of `time.perf_counter`."""

    phase: str
    begun: float
    ended: float


class StepClock:
    """Divides the time of a step. `communication_s`: the seconds that this rank has spent in communication so far.

    Each lap ends one phase, and the next begins. Communication within a phase counts as communication alone.
    """

    def __init__(self, communication_s: Callable[[], float]) -> None:
        self._communication_s = communication_s
        self.own_s = 0.0
        """Seconds that the clock itself has taken so far."""
        self.on_lap: Callable[[Lap], object] | None = None
        """Is told each lap, while somebody listens."""
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self.seconds = dict.fromkeys(PHASES, 0.0)
        """Of each phase so far, without communication."""
        self.comm_s = 0.0
        self._began = self._at = time.perf_counter()
        self._comm = self._communication_s()

    def lap(self, phase: str) -> None:
        """The time since the last lap was of this phase."""
        began = self._at
        self.seconds[phase] += self._next()
        if self.on_lap is not None:
            self.on_lap(Lap(phase, began, self._at))
        self.own_s += time.perf_counter() - self._at

    def skip(self) -> None:
        """The time since the last lap, without communication, was of no phase."""
        self._next()

    def _next(self) -> float:
        """Begin the next lap. Returns the seconds of the one before, without communication."""
        before, began = self._comm, self._at
        self._at = time.perf_counter()
        self._comm = self._communication_s()
        self.comm_s += self._comm - before
        return self._at - began - (self._comm - before)

    def move(self, seconds: float, source: str, target: str) -> None:
        """Count a part of one phase as another: what took it is known later than the lap."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    @property
    def step_s(self) -> float:
        """Seconds of the step so far."""
        return time.perf_counter() - self._began


class CpuClock:
    """The CPU time of the calling thread, and the time in which it was ready to run and had no core.

    The second is the run delay of Linux's scheduler (Documentation/scheduler/sched-stats.rst); NaN on other systems.
    """

    def __init__(self) -> None:
        self._file: int | None = None  # opened by the thread that uses it

    def begin(self) -> None:
        """From now on."""
        if self._file is None:
            self._file = -1
            with suppress(OSError):
                self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self._cpu_s, self._delay_s = time.thread_time(), self._run_delay_s()

    def read(self) -> tuple[float, float]:
        """Seconds of both since `begin`."""
        return time.thread_time() - self._cpu_s, self._run_delay_s() - self._delay_s

    def _run_delay_s(self) -> float:
        try:
            return int(os.pread(self._file or -1, 128, 0).split()[1]) * 1e-9
        except (OSError, ValueError, IndexError):
            return float("nan")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None and self._file >= 0:
            os.close(self._file)
        self._file = None
