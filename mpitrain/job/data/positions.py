"""Which samples of the training data the steps of a run take: pure arithmetic."""

from collections.abc import Iterable, Sequence

import numpy as np

from mpitrain.job.data.left_out import Interval, merged, moved_past


class Positions:
    """The samples of each step, counted from the begin of the run. `batch`: samples in a global batch."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.left_out: list[Interval] = []
        """The samples that no step trains on: see `leave_out`."""
        self._step, self._sample = 0, 0  # where the current order begins: see `go_on`

    def samples(self, step: int, rows: np.ndarray) -> np.ndarray:
        """The samples that are the rows of a step's global batch: int64."""
        return moved_past(self._sample, (step - self._step) * self.batch + rows, self.left_out)

    def next_sample(self, step: int) -> int:
        """The position in the data of a step's first sample: the number of samples before it, those left out included."""
        return int(self.samples(step, np.zeros(1, np.int64))[0])

    def go_on(self, step: int, next_sample: int) -> None:
        """Let the global batch of `step` begin at `next_sample`, because the run may have been saved with another batch size."""
        self._step, self._sample = step, next_sample

    def leave_out(self, intervals: Iterable[Sequence[int]]) -> None:
        """Leave out further samples, `begin` to `end - 1` of each interval: later steps train on the samples after them.

        The steps before an interval keep their samples. Call it between two steps.
        """
        self.left_out = merged([*self.left_out, *intervals])
