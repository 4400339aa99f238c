"""The time axis of a run: seconds since its start."""

import math

import numpy as np

from mpitrain.view.reading.run import Event, RunRecord
from mpitrain.view.report.charts import Array


class TimeAxis:
    """Seconds from the start of a run to its steps and events.

    `is_wall`: whether the seconds are those of the wall clock, pauses between jobs included. Old runs have only the times of steps.
    """

    def __init__(self, run: RunRecord) -> None:
        self._steps = run.steps.step
        step_s = np.nan_to_num(run.steps.column("step_s"))
        time = run.time
        self.is_wall = bool(len(time)) and bool(np.isfinite(time).all())
        self.start = math.nan
        """Unix seconds of the start; NaN if unknown."""
        if self.is_wall:
            begun = run.events[0].time if run.events and run.events[0].kind == "begin" else math.nan
            self.start = min(begun, float(time[0] - step_s[0])) if math.isfinite(begun) else float(time[0] - step_s[0])
            self.seconds: Array = np.maximum.accumulate(time - self.start)
        else:
            self.seconds = np.cumsum(step_s)

    def of_steps(self, steps: Array) -> Array:
        """The seconds to the end of each of these steps."""
        if not len(self._steps):
            return np.zeros(len(steps))
        found: Array = np.interp(steps, self._steps, self.seconds)
        return found

    def of_step(self, step: int) -> float:
        """The seconds to the end of this step."""
        return float(self.of_steps(np.array([step]))[0])

    def of_event(self, event: Event) -> float:
        """The seconds to an event: by its time, else by its step; NaN if both are unknown."""
        if self.is_wall and math.isfinite(event.time):
            return event.time - self.start
        return math.nan if event.step is None else self.of_step(event.step)
