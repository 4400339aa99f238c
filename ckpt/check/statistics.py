"""Mean, deviation, extremes and distribution of tensors of any size: chunk by chunk, in a few MiB of memory."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ckpt.reading.entry import TensorEntry
from ckpt.storage.progress import Progress, no_progress

Number = int | float

_PIECE = 1 << 16  # elements processed at a time: as float64 they fit into the cache
_DOWN = 2.0**-600
"""Scales numbers down so that the sum of their squares does not overflow. Only numbers too small to matter lose bits."""


class Statistics(NamedTuple):
    """Statistics of the finite values of a tensor; None if there are none. The extremes of integers are exact; the rest is float64.

    For complex values: statistics of their absolute values.

    `std`: of the whole population (NumPy's default), not an estimate from a sample. `num_nan`, `num_inf`: counts of other values.
    """

    num_finite: int
    mean: float | None
    std: float | None
    min: Number | None
    max: Number | None
    num_nan: int
    num_inf: int


class Histogram(NamedTuple):
    """The numbers of finite values from each edge up to the next one; the last bin includes its end. One more edge than counts."""

    edges: list[float]
    counts: list[int]


def statistics_of(entry: TensorEntry, progress: Progress = no_progress) -> Statistics:
    """The statistics of `entry`, which is read once. CheckpointError for damage."""
    count, mean, std = 0, 0.0, 0.0
    ends: list[Number] = []  # the least and the largest so far
    num_nan = num_inf = 0
    for piece in _pieces(entry, progress):
        numbers, nans, infs = _finite(piece)
        num_nan, num_inf = num_nan + nans, num_inf + infs
        if not numbers.size:
            continue
        # float64 rounds integers beyond 2**53, so the extremes are taken from the integers.
        own = piece if piece.dtype.kind in "iub" else numbers
        ends = [*ends, own.min().item(), own.max().item()]
        ends = [min(ends), max(ends)]
        count, mean, std = _joined(count, mean, std, numbers)
    if not ends:
        return Statistics(0, None, None, None, None, num_nan, num_inf)
    low, high = (int(end) if isinstance(end, bool) else end for end in ends)
    return Statistics(count, mean, std, low, high, num_nan, num_inf)


def histogram_of(entry: TensorEntry, stats: Statistics, bins: int, progress: Progress = no_progress) -> Histogram:
    """The distribution of `entry`, whose `statistics_of` are `stats`, in at most `bins` bins of the same width.

    If there are few integers, each gets a bin from n - 0.5 to n + 0.5. Reads the tensor again. Without finite values: no bins.
    """
    if stats.min is None or stats.max is None:
        return Histogram([], [])
    edges = _edges(stats.min, stats.max, bins)
    counts = np.zeros(len(edges) - 1, np.int64)
    for piece in _pieces(entry, progress):
        counts += np.histogram(_finite(piece)[0], edges)[0]
    return Histogram(edges.tolist(), counts.tolist())


def _pieces(entry: TensorEntry, progress: Progress) -> Iterator[np.ndarray]:
    for chunk in entry.chunks():
        for first in range(0, chunk.size, _PIECE):
            yield chunk[first : first + _PIECE]
        progress(chunk.nbytes)


def _finite(piece: np.ndarray) -> tuple[np.ndarray, int, int]:
    """The finite values as float64, of complex ones their absolute values, and the numbers of NaNs and infinities."""
    if piece.dtype.kind == "c":
        with np.errstate(over="ignore"):  # absolute values may be too large for float64
            numbers = np.abs(piece.astype(np.complex128))
    else:
        numbers = piece.astype(np.float64)
    finite = np.isfinite(numbers)
    if finite.all():
        return numbers, 0, 0
    nans = int(np.isnan(numbers).sum())
    return numbers[finite], nans, int(numbers.size - finite.sum()) - nans


def _joined(count: int, mean: float, std: float, numbers: np.ndarray) -> tuple[int, float, float]:
    """The count, mean and deviation of the earlier numbers and `numbers` together (Chan, Golub, LeVeque 1979).

    Computed with deviations, because the squares of numbers beyond 1e154 overflow float64.
    """
    size, total = numbers.size, count + numbers.size
    with np.errstate(over="ignore", invalid="ignore"):  # a sum may overflow in both directions
        its_mean = float(numbers.mean())
        if not math.isfinite(its_mean):  # the sum was too large
            its_mean = float((numbers / size).sum())
        variance = float(np.square(numbers - its_mean).mean())
        its_std = math.sqrt(variance)
        if not math.isfinite(variance):
            its_std = math.sqrt(np.square(numbers * _DOWN - its_mean * _DOWN).mean()) / _DOWN
    ours, its = count / total, size / total
    half = its_mean / 2 - mean / 2  # half of the distance, which may overflow
    std = math.hypot(std * math.sqrt(ours), its_std * math.sqrt(its), half * (2 * math.sqrt(ours * its)))
    distance = its_mean - mean
    mean = mean + distance * its if math.isfinite(distance) else mean * ours + its_mean * its
    return total, mean, std


def _edges(low: Number, high: Number, bins: int) -> np.ndarray:
    if isinstance(low, int) and high - low < bins and max(-low, high) < 1 << 52:
        return np.arange(low, high + 2, dtype=np.float64) - 0.5
    low, high = float(low), float(high)
    if low == high:
        around, largest = max(0.5, abs(low) / 1000), np.finfo(np.float64).max
        low, high = max(low - around, -largest), min(high + around, largest)
    # Weighted ends, because their distance may be infinite, or too small to divide.
    weights = np.linspace(0.0, 1.0, bins + 1)
    edges = np.clip(low * (1 - weights) + high * weights, low, high)
    edges[0], edges[-1] = low, high
    return np.unique(edges)
