"""The time that a run has left, by the pace of its last steps."""

from collections import deque

STEPS = 1000
"""The pace is a mean over so many steps. Saves and evaluations between them count as well."""


class Pace:
    """The mean time of the last steps, from the times at their ends."""

    def __init__(self) -> None:
        self._ends: deque[tuple[int, float]] = deque(maxlen=STEPS + 1)

    def add(self, step: int, time_s: float) -> None:
        """A step has ended at this time, by any clock in seconds. After a step back the pace begins anew."""
        if self._ends and (step <= self._ends[-1][0] or time_s < self._ends[-1][1]):
            self._ends.clear()
        self._ends.append((step, time_s))

    def forget(self) -> None:
        """Begin anew, after the steps were interrupted."""
        self._ends.clear()

    @property
    def step_s(self) -> float | None:
        """Seconds for a step; None before the second one."""
        if len(self._ends) < 2:
            return None
        (first, began), (last, ended) = self._ends[0], self._ends[-1]
        return (ended - began) / (last - first)

    def left_s(self, steps: int) -> float | None:
        """Seconds until `steps` steps are done; None before the second step."""
        return None if self.step_s is None else max(steps - self._ends[-1][0], 0) * self.step_s
