"""Which source a row comes from: a function of the seed, the number of the row in its lane, and the lane.

The lanes are permuted, and laid out evenly over [0, 1) from a begin that moves by the golden ratio from row to row. Each source has a
part of [0, 1) as large as its weight. So the rows that all lanes make at the same time have as many of a source as its weight asks for,
rounded up or down. Over many rows the rounding adds up to a few rows: the golden ratio's multiples are spread evenly (Kronecker's
sequence).
"""

from collections.abc import Sequence

import numpy as np

from mpitrain.job.data.order import keys_of, permute

Points = Sequence[tuple[float, float]]
"""The weight of a source: (step, weight) in order; between two of them the weight changes linearly."""

_GOLDEN = 0.6180339887498949


class Mixture:
    """The weights of sources.

    Args:
        points: of each source.
        seed: the run's seed.
        lanes: the number of lanes.
        per_lane: rows of a lane in each step.

    Raises:
        ValueError: weights that are negative, or all 0 at a step.
    """

    def __init__(self, points: Sequence[Points], *, seed: int, lanes: int, per_lane: int = 1) -> None:
        self._points = [tuple(np.array(each, float).T) for each in points]
        self._seed, self._lanes, self._per_lane = seed, lanes, per_lane
        for step in sorted({step for each in points for step, _ in each}):
            weights = self._weights(step)
            if (weights < 0).any() or not weights.sum() > 0:
                raise ValueError(
                    f"data.sources: expected weights of at least 0, and one above 0, got {weights.tolist()} at step {step}"
                )

    def weights(self, step: int) -> np.ndarray:
        """The share of each source at a step."""
        weights = self._weights(step)
        return np.asarray(weights / weights.sum())

    def sources(self, row: int, lanes: np.ndarray) -> np.ndarray:
        """The number of the source of each lane's row number `row`."""
        places = permute(lanes, self._lanes, keys_of(self._seed, "mixture", row))
        begin = (0.5 + row * _GOLDEN) % 1.0
        ends = np.cumsum(self.weights(row // self._per_lane))
        ends[-1] = 1.0
        return np.searchsorted(ends, (places + begin) / self._lanes, side="right")

    def _weights(self, step: float) -> np.ndarray:
        return np.array([np.interp(step, steps, weights) for steps, weights in self._points])
