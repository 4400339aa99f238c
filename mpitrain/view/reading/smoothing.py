"""Curves without their noise."""

import numpy as np

from mpitrain.view.reading.tables import Array


def smoothed(values: Array, half: int) -> Array:
    """(n,) means over up to `half` neighbours on both sides, as many on each: a mean of the past alone would lag behind. NaN stays NaN.

    report/page/base.js has the same function.
    """
    known = np.isfinite(values)
    total = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    count = np.concatenate([[0], np.cumsum(known)])
    at = np.arange(len(values))
    reach = np.minimum(half, np.minimum(at, len(values) - 1 - at))
    begin, end = at - reach, at + reach + 1
    mean = (total[end] - total[begin]) / np.maximum(count[end] - count[begin], 1)
    result: Array = np.where(known, mean, np.nan)
    return result
