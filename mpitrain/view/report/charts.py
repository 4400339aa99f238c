"""What a report draws: charts, and panels of ranks or layers, as arrays. Pure; `document.py` and `pictures.py` draw them.

A run may have more steps than a chart has pixels. So the steps are put into buckets, and a series has the mean, the least and the
largest value of each bucket: a spike of one step stays visible.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

POINTS = 2000
"""The most buckets of a series, about the pixels of a chart over the width of a page."""
BEYOND = 10.0
"""Cells farther from the median than so many times the distance of the 1 % and the 99 % quantile have the last colour: else one cell
would leave no colours for the others."""


class Axis(NamedTuple):
    """The place of each bucket: its last step, and the seconds from the start of the run to the end of that step. (m,) each."""

    step: Array
    seconds: Array


class Series(NamedTuple):
    """A line of a chart. `run`: the number of the run on the page."""

    label: str
    run: int
    axis: Axis
    mean: Array
    low: Array | None = None
    high: Array | None = None
    """None where each bucket has one step."""
    colour: int = 0
    """Of an area in a stack: the number of its colour."""


class Chart(NamedTuple):
    """A chart of lines, or of areas that are stacked in their order."""

    name: str
    """For names of files: lower case, digits, hyphens."""
    title: str
    unit: str
    section: str
    series: list[Series]
    note: str = ""
    run: int | None = None
    """The one run of which the chart is; None for all runs."""
    is_stacked: bool = False
    is_log: bool = False
    is_smooth: bool = False
    """Whether a smoothed line is drawn, over the values."""
    from_zero: bool = False
    is_wide: bool = False


class Cells(NamedTuple):
    """Values of rows (ranks or layers) in buckets: (m, rows) float."""

    axis: Axis
    values: Array


class RankSpread(NamedTuple):
    """The least, the median and the largest value of the ranks in each bucket, and the rank that has the largest. (m,) each."""

    axis: Axis
    low: Array
    median: Array
    high: Array
    worst: Array


class PanelFigure(NamedTuple):
    """A figure that a panel can show."""

    name: str
    label: str
    unit: str
    cells: Cells | None
    spread: RankSpread | None
    is_log: bool = False


class Panel(NamedTuple):
    """Heat maps of one run, of which the page shows one at a time: rows are ranks or layers, columns are buckets of steps."""

    name: str
    title: str
    note: str
    run: int
    row_word: str
    rows: list[str]
    figures: list[PanelFigure]


class Buckets:
    """Puts n steps into at most `points` buckets of equally many steps."""

    def __init__(self, step: Array, seconds: Array, points: int = POINTS) -> None:
        size = max(1, math.ceil(len(step) / points))
        self._begins = np.arange(0, len(step), size)
        last = np.minimum(self._begins + size, len(step)) - 1
        self.axis = Axis(step[last], seconds[last])
        self.is_exact = size == 1
        """Whether each bucket has one step."""

    def mean(self, values: Array) -> Array:
        """The means of buckets, over the last axis but the first; NaN for buckets without a value."""
        if self.is_exact:
            return values
        known = np.isfinite(values)
        count = np.add.reduceat(known, self._begins, axis=0, dtype=np.int64)
        total = np.add.reduceat(np.where(known, values, 0.0), self._begins, axis=0, dtype=np.float64)
        mean: Array = np.where(count > 0, total / np.maximum(count, 1), np.nan)
        return mean

    def low(self, values: Array) -> Array:
        """The least values of buckets."""
        return values if self.is_exact else np.fmin.reduceat(values, self._begins, axis=0)

    def high(self, values: Array) -> Array:
        """The largest values of buckets."""
        return values if self.is_exact else np.fmax.reduceat(values, self._begins, axis=0)

    def at_high(self, values: Array, of: Array) -> Array:
        """The values at the rows in which `of` is largest."""
        if self.is_exact:
            return values
        ends = [*self._begins[1:].tolist(), len(values)]
        largest = np.where(np.isfinite(of), of, -np.inf)
        rows = [
            begin + int(largest[begin:end].argmax()) for begin, end in zip(self._begins.tolist(), ends, strict=True)
        ]
        return values[rows]

    def series(self, label: str, run: int, values: Array) -> Series:
        """The series of these values."""
        if self.is_exact:
            return Series(label, run, self.axis, values)
        return Series(label, run, self.axis, self.mean(values), self.low(values), self.high(values))


def scale(kind: str, values: Sequence[Array]) -> tuple[float, str]:
    """The factor and the unit with which values of a kind are short to read. Kinds: s, B, B/s, share, count/s, or the unit itself."""
    finite = [np.abs(each[np.isfinite(each)]) for each in values]
    known = np.concatenate(finite) if finite else np.zeros(0)
    most = float(np.quantile(known, 0.9)) if len(known) else 0.0
    if kind == "s":
        return (1e3, "ms") if most < 1 else (1.0, "s") if most < 600 else (1 / 60, "min")
    if kind == "share":
        return 100.0, "%"
    stem, per, time = kind.partition("/s")
    if stem in ("B", "tokens"):
        power = min(4, int(math.log10(most) // 3)) if most >= 1000 else 0
        prefix = ("", "k", "M", "G", "T")[power]
        return 10.0 ** (-3 * power), (f"{prefix}B" if stem == "B" else f"{prefix} {stem}".strip()) + per + time
    return 1.0, kind


def colour_limits(values: Array, *, is_log: bool) -> tuple[float, float, bool]:
    """The values with the first and the last colour of a heat map, and whether some values are larger. A logarithmic one leaves out
    values that are not positive."""
    finite = values[np.isfinite(values) & ((values > 0) if is_log else True)]
    if not len(finite):
        return 1.0, 1.0, False
    low, high = float(finite.min()), float(finite.max())
    first, middle, last = np.quantile(finite, [0.01, 0.5, 0.99]).tolist()
    if is_log or first == last:
        return low, high, False
    reach = BEYOND * (last - first)
    return max(low, middle - reach), min(high, middle + reach), high > middle + reach
