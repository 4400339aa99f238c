"""Curves drawn with braille characters, 2 x 4 dots each, with axes. Without Unicode: with . ' and :"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from rich.text import Text

from mpitrain.view.watch.series import Array

_BITS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]], np.uint8)  # (4 dots down, 2 across)
_UPPER, _LOWER = 0x1B, 0xE4  # the dots of the upper and the lower half
_OUTLIERS = 0.02
_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


class Curve(NamedTuple):
    """A series to draw, in order of step."""

    steps: Array
    """(n,)"""
    values: Array
    """(n,), finite"""
    style: str
    """of rich"""
    mark: str = ""
    """The character of each point; "": a line joins the points."""


def plot(
    curves: Sequence[Curve], *, width: int, height: int, span: tuple[float, float], ascii_only: bool = False
) -> list[Text]:
    """A chart in `height` lines of `width` characters; later curves are drawn over earlier ones.

    The last two lines are the axis of steps, from `span[0]` to `span[1]`. The limits of the values are those of all curves, without
    outliers of the first: see `limits`.
    """
    rows = height - 2
    low, high = limits(curves)
    ticks = nice_ticks(low, high, (rows + 3) // 2 if rows < 8 else rows // 3 + 1)
    names = labels(ticks)
    left = max(map(len, names), default=0)
    columns = width - left - 1
    if rows < 1 or columns < 2:
        return [Text(" " * width) for _ in range(height)]
    canvas = _Canvas(rows, columns, ascii_only)
    for number, curve in enumerate(curves):
        across = _scaled(curve.steps, *span, 2 * columns)
        down = 4 * rows - 1 - _scaled(curve.values, low, high, 4 * rows)
        canvas.draw(across, down, number, curve.mark)
    down = 4 * rows - 1 - _scaled(np.array(ticks), low, high, 4 * rows)
    at_row = dict(zip((down.astype(int) // 4).tolist(), names, strict=True))
    side, tick_mark, corner, floor_tick, floor = "|+++-" if ascii_only else "│┤└┬─"
    lines = []
    for row in range(rows):
        name = at_row.get(row)
        line = Text(f"{name or '':>{left}}{side if name is None else tick_mark}", style="dim")
        lines.append(line.append_text(canvas.line(row, [curve.style for curve in curves])))
    axis, numbers = _axis_of_steps(*span, columns, floor_tick, floor)
    foot = " " * (left + 1) + numbers
    if foot.startswith(" " * 5):
        foot = "step" + foot[4:]
    return [*lines, Text(" " * left + corner + axis, style="dim"), Text(foot, style="dim")]


def limits(curves: Sequence[Curve]) -> tuple[float, float]:
    """The lowest and the highest value to draw. A few values far from the others (a spike, a slow first step) are left outside, because
    the others would be a flat line; they are drawn at the edge."""
    ranges = []
    for curve in curves:
        if not len(curve.values):
            continue
        low, high = float(curve.values.min()), float(curve.values.max())
        inner_low, inner_high = (float(x) for x in np.quantile(curve.values, [_OUTLIERS, 1 - _OUTLIERS]))
        inner = inner_high - inner_low
        if inner > 0 and high - low > 4 * inner:
            low, high = max(low, inner_low - inner / 2), min(high, inner_high + inner / 2)
        ranges.append((low, high))
    if not ranges:
        return 0.0, 1.0
    low, high = min(low for low, _ in ranges), max(high for _, high in ranges)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        room = 0.05 * abs(high) or 1.0
        return low - room, high + room
    return low, high


def nice_ticks(low: float, high: float, most: int) -> list[float]:
    """At most `most` multiples of 1, 2 or 5 times a power of ten between two values."""
    raw = (high - low) / max(most, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    for step in (power, 2 * power, 5 * power, 10 * power, 20 * power):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 <= most:
            return [number * step for number in range(first, last + 1)]
    return []


def labels(ticks: Sequence[float]) -> list[str]:
    """The ticks in words with k, M, G or T, all with as many digits as it takes to tell them apart."""
    if not ticks:
        return []
    largest = max(map(abs, ticks))
    power, unit = next(((power, unit) for power, unit in _UNITS if largest >= power), (1.0, ""))
    if largest and largest < 1e-3:
        return [f"{tick:.3g}" for tick in ticks]
    apart = min((b - a for a, b in itertools.pairwise(ticks)), default=largest or 1.0) / power
    digits = max(0, -math.floor(math.log10(apart) + 1e-9))
    return [f"{tick / power:.{digits}f}{unit}" for tick in ticks]


def _scaled(values: Array, low: float, high: float, size: int) -> Array:
    """Places of values among `size` dots; values outside are at the edge."""
    if high <= low:
        return np.full(len(values), size // 2)
    return np.rint(np.clip((values - low) / (high - low), 0, 1) * (size - 1))


def _axis_of_steps(first: float, last: float, columns: int, tick: str, foot: str) -> tuple[str, str]:
    """The line below the curves, and the line of its numbers."""
    axis, numbers = [foot] * columns, [" "] * columns
    ticks = nice_ticks(first, last, max(columns // 10, 2)) if last > first else [first]
    free = 0
    for step in (tick for tick in ticks if tick == round(tick)):
        column = int(_scaled(np.array([step]), first, last, 2 * columns)[0]) // 2
        name = f"{step:,.0f}"
        begin = min(max(column - len(name) // 2, 0), columns - len(name))
        if begin < free:
            continue
        axis[column] = tick
        numbers[begin : begin + len(name)] = name
        free = begin + len(name) + 1
    return "".join(axis), "".join(numbers)


class _Canvas:
    """Characters that curves are drawn on. A character has the style of the last curve in it."""

    def __init__(self, rows: int, columns: int, ascii_only: bool) -> None:
        self._bits = np.zeros((rows, columns), np.uint8)
        self._owner = np.zeros((rows, columns), int)
        self._marks: dict[tuple[int, int], str] = {}
        self._ascii_only = ascii_only

    def draw(self, across: Array, down: Array, owner: int, mark: str) -> None:
        """Draw points at these dots, (n,) each, and lines between them unless they have a mark."""
        if mark:
            for x, y in zip(across.astype(int) // 2, down.astype(int) // 4, strict=True):
                self._marks[y, x] = "o" if self._ascii_only else mark
                self._owner[y, x] = owner
            return
        xs, ys = _dots(*_thinned(across, down))
        np.bitwise_or.at(self._bits, (ys // 4, xs // 2), _BITS[ys % 4, xs % 2])
        self._owner[ys // 4, xs // 2] = owner

    def line(self, row: int, styles: Sequence[str]) -> Text:
        """A line of the canvas."""
        line = Text()
        for column, bits in enumerate(self._bits[row]):
            style = styles[self._owner[row, column]] if styles else ""
            line.append(self._marks.get((row, column)) or self._glyph(int(bits)), style=style)
        return line

    def _glyph(self, bits: int) -> str:
        if not bits:
            return " "
        if not self._ascii_only:
            return chr(0x2800 + bits)
        return ":" if bits & _UPPER and bits & _LOWER else "'" if bits & _UPPER else "."


def _thinned(across: Array, down: Array) -> tuple[Array, Array]:
    """At most four points for each column of dots: the first, the lowest, the highest and the last. They give the same picture."""
    if not len(across):
        return across, down
    begins = np.flatnonzero(np.diff(across, prepend=-1))
    ends = np.append(begins[1:], len(across)) - 1
    of_columns = [down[begins], np.minimum.reduceat(down, begins), np.maximum.reduceat(down, begins), down[ends]]
    return np.repeat(across[begins], 4), np.stack(of_columns, axis=1).ravel()


def _dots(across: Array, down: Array) -> tuple[np.ndarray, np.ndarray]:
    """The dots of the lines that join points."""
    if not len(across):
        return across.astype(int), down.astype(int)
    lengths = np.maximum(np.maximum(abs(np.diff(across)), abs(np.diff(down))), 1).astype(int)
    segment = np.repeat(np.arange(len(lengths)), lengths)
    part = (np.arange(len(segment)) - np.repeat(np.cumsum(lengths) - lengths, lengths)) / lengths[segment]
    xs = np.append(across[segment] + np.diff(across)[segment] * part, across[-1])
    ys = np.append(down[segment] + np.diff(down)[segment] * part, down[-1])
    return np.rint(xs).astype(int), np.rint(ys).astype(int)
