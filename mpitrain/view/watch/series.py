"""Series of figures in bounded memory."""

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class Thinned:
    """A figure over all steps in at most `limit` points. When they are full, each two neighbours become one, with their mean."""

    def __init__(self, limit: int) -> None:
        """`limit`: an even number."""
        self._limit = limit
        self._each = 1  # steps of a point
        self._steps: list[int] = []  # the last step of each point
        self._values: list[float] = []
        self._sum, self._num = 0.0, 0  # of the point under way
        self._last = 0

    def add(self, step: int, value: float) -> None:
        """Add the figure of the next step."""
        self._sum += value
        self._num += 1
        self._last = step
        if self._num < self._each:
            return
        self._steps.append(step)
        self._values.append(self._sum / self._num)
        self._sum, self._num = 0.0, 0
        if len(self._steps) == self._limit:
            self._each *= 2
            self._steps = self._steps[1::2]
            self._values = [(a + b) / 2 for a, b in zip(self._values[::2], self._values[1::2], strict=True)]

    def points(self) -> tuple[Array, Array]:
        """Steps and values, (n,) each."""
        steps, values = list(self._steps), list(self._values)
        if self._num:
            steps.append(self._last)
            values.append(self._sum / self._num)
        return np.array(steps, float), np.array(values, float)
