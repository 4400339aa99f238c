"""The curves of the loss and the throughput, for a range of steps."""

from typing import NamedTuple

import numpy as np
from rich.text import Text

from mpitrain.view.reading.smoothing import smoothed
from mpitrain.view.watch.plot import Curve, plot
from mpitrain.view.watch.series import Array
from mpitrain.view.watch.watched import Watched

_LEAST_RANGE = 20
TWO_CHARTS = 72
"""The width of two charts side by side."""


class Screen(NamedTuple):
    """What the lines are for."""

    width: int
    height: int | None = None
    """None: as many lines as there is to say, such as for a file."""
    ascii_only: bool = False
    has_colour: bool = True
    has_keys: bool = False


class Range(NamedTuple):
    """The steps that the curves show."""

    size: int | None = None
    """None: all steps."""
    back: int = 0
    """The steps between the last one shown and the last one of the run."""

    def zoomed(self, done: int, *, closer: bool) -> "Range":
        """Half or twice as many steps. `done`: the steps of the run so far."""
        size = (self.size or done) // 2 if closer else (self.size or done) * 2
        return Range(max(size, _LEAST_RANGE), self.back) if size + self.back < done else Range()

    def moved(self, done: int, *, later: bool) -> "Range":
        """Half a range earlier or later."""
        if self.size is None:
            return self
        back = self.back + (-1 if later else 1) * (self.size // 2)
        return self._replace(back=max(min(back, done - self.size), 0))

    def span(self, first: int, last: int) -> tuple[int, int]:
        """The first and the last step to show of those that a run has."""
        end = max(last - self.back, first)
        return (first if self.size is None else max(end - self.size + 1, first)), end


def charts(run: Watched, screen: Screen, steps: Range, height: int) -> list[Text]:
    """The loss and the throughput: side by side, or one above the other, or the loss alone."""
    if run.last is None or height < 5:
        return []
    oldest, newest = run.first_step or 1, run.last["step"]
    span = steps.span(oldest, newest)
    marks = (run.heldout.points(), "magenta")
    gap, width = 2, screen.width
    if width >= TWO_CHARTS:
        half = (width - gap) // 2
        left = _chart("loss", _points(run, "loss", span), span, half, height, screen, marks)
        right = _chart("tokens/s", _points(run, "tokens_per_s", span), span, half, height, screen)
        return [_padded(a, half + gap).append_text(b) for a, b in zip(left, right, strict=True)]
    if height < 14:
        return _chart("loss", _points(run, "loss", span), span, width, height, screen, marks)
    upper = (height + 1) // 2
    return [
        *_chart("loss", _points(run, "loss", span), span, width, upper, screen, marks),
        *_chart("tokens/s", _points(run, "tokens_per_s", span), span, width, height - upper, screen),
    ]


def _chart(
    title: str, points: tuple[Array, Array], span: tuple[int, int], width: int, height: int, screen: Screen,
    marks: tuple[tuple[Array, Array], str] | None = None,
) -> list[Text]:  # fmt: skip
    """A title and a plot: the figures, and their mean over neighbours."""
    numbers, values = points
    half = len(values) // 50
    curves = [Curve(numbers, values, "bright_black" if half else "cyan")]
    heading = Text.assemble((title, "bold"))
    if half:
        each = (numbers[-1] - numbers[0]) / (len(numbers) - 1)
        curves.append(Curve(numbers, smoothed(values, half), "cyan"))
        heading.append(f"  mean of {(2 * half + 1) * each:,.0f} steps", style="cyan")
    if marks is not None:
        steps, heldout = marks[0]
        is_shown = (steps >= span[0]) & (steps <= span[1])
        if is_shown.any():
            mark = "●" if 3 * is_shown.sum() <= width else ""  # more marks would hide the curve
            curves.append(Curve(steps[is_shown], heldout[is_shown], marks[1], mark))
            heading.append(f"  {mark} held-out" if not screen.ascii_only else "  held-out", style=marks[1])
    heading.truncate(width)
    return [heading, *plot(curves, width=width, height=height - 1, span=span, ascii_only=screen.ascii_only)]


def _points(run: Watched, name: str, span: tuple[int, int]) -> tuple[Array, Array]:
    """The figures of these steps: of each, if the recent ones have them."""
    first, last = span
    if run.recent and run.recent[0]["step"] <= first:
        found = [
            (line["step"], value)
            for line in run.recent
            if first <= line["step"] <= last and (value := line.get(name)) is not None
        ]
        pairs = np.array(found, float).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]
    steps, values = run.series[name].points()
    is_shown = (steps >= first) & (steps <= last)
    return steps[is_shown], values[is_shown]


def _padded(line: Text, width: int) -> Text:
    line.pad_right(max(width - line.cell_len, 0))
    return line
