"""Spikes: values far above the last ones. Pure: no torch, no MPI.

The robust z-score of a value is its distance from the median of the window, divided by 1.4826 times the median absolute deviation,
which is the standard deviation if the values are normal (Iglewicz and Hoaglin, "How to detect and handle outliers", 1993). Outliers in
the window change both little. The window has the last accepted values, and no spike.

[Note: threshold] A false alarm of one in 100 runs of 2,000 steps with two signals is a probability of 2.5e-6 per value. Normal noise
reaches it at 4.6 standard deviations, noise with exponential tails (Laplace) at 12, and Student's t with 5 degrees of freedom, whose
fourth moment is the last finite one, at 19. In 2,000 steps of a GPT with 0.1 M parameters and 768 targets in a step the highest score
of a loss was 4.2, and that of a gradient norm 7.7. There a score of 20 is a loss 3 nats above
the median, or a norm of 6 times the median.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

WINDOW = 128
"""Accepted values in the window."""
FEWEST = 32
"""Accepted values before the first decision: with fewer the deviation is too uncertain."""
MOST_IN_A_ROW = 10
"""Spikes in a row after which the values are a new level, and not spikes: the window starts anew."""
_NORMAL = 1.4826
_SMALLEST_SCALE = 0.005
"""Of the median's absolute value: a series that hardly varies has no spike at its first small change."""


class Spike(NamedTuple):
    """A value that is a spike, of the series `what`."""

    what: str
    value: float
    median: float
    score: float


class Window:
    """The last accepted values of one series. `in_logs`: the values are positive, and vary by factors."""

    def __init__(self, what: str, threshold: float, *, in_logs: bool = False) -> None:
        self.what, self._threshold, self._in_logs = what, threshold, in_logs
        self._values: deque[float] = deque(maxlen=WINDOW)
        self._in_a_row = 0

    def judge(self, value: float) -> Spike | None:
        """The spike that a finite value is; None if it is none. Changes nothing: see `accept` and `refuse`."""
        seen = self._seen(value)
        if len(self._values) < FEWEST or seen <= max(self._values):
            return None  # almost always
        median, scale = robust_scale(self._values, smallest=0.05 if self._in_logs else None)
        score = (seen - median) / scale
        if not score > self._threshold:
            return None
        return Spike(self.what, value, math.exp(median) if self._in_logs else median, score)

    def accept(self, value: float) -> None:
        """The value is usual: it enters the window."""
        self._in_a_row = 0
        self._values.append(self._seen(value))

    def refuse(self) -> bool:
        """The value is a spike, or that of a step with a spike. Returns whether it begins a new level: the window is empty now."""
        self._in_a_row += 1
        if self._in_a_row <= MOST_IN_A_ROW:
            return False
        self._values.clear()
        self._in_a_row = 0
        return True

    def state(self) -> list[float | int]:
        """Plain numbers for a checkpoint."""
        return [self._in_a_row, *self._values]

    def load(self, state: Sequence[float]) -> None:
        """Load the result of `state`; an empty one empties the window."""
        self._in_a_row = int(state[0]) if state else 0
        self._values = deque(state[1:], maxlen=WINDOW)

    def _seen(self, value: float) -> float:
        return math.log(max(value, 1e-30)) if self._in_logs else value


def robust_scale(values: Sequence[float] | deque[float], *, smallest: float | None = None) -> tuple[float, float]:
    """The median, and the robust standard deviation. `smallest`: the least deviation; None: a share of the median."""
    median = statistics.median(values)
    deviation = statistics.median(abs(value - median) for value in values)
    least = max(_SMALLEST_SCALE * abs(median), 1e-12) if smallest is None else smallest
    return median, max(_NORMAL * deviation, least)
