"""The charts of a report as pictures for papers. matplotlib is imported only here, and only when a command asks for pictures."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.shared.pictures import need_matplotlib, new_figure
from mpitrain.view.reading.run import RunRecord
from mpitrain.view.reading.smoothing import smoothed
from mpitrain.view.report.charts import Axis, Chart, Panel, PanelFigure, Series, colour_limits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 6.3, 2.6
"""Inches: the width of the text on a page."""
DPI = 220
SMOOTHING = 0.02
"""Half of the width of the smoothing, as a share of the points: the first setting of the page."""
COLOURS = ("#0072b2", "#c8500a", "#00835f", "#a8457f", "#8f6800", "#2683b8", "#6a51a3", "#5d5d5d")
STACK_COLOURS = ("#4c86b8", "#1f567f", "#8fb8d6", "#e08a4f", "#d9b74a", "#8b8b86", "#cfcec9")
DASHES = ("-", "--", ":", "-.")
STYLE: dict[Any, Any] = {
    "font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "legend.fontsize": 7, "xtick.labelsize": 7, "ytick.labelsize": 7,
    "axes.linewidth": 0.6, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#555555",
    "xtick.color": "#555555", "ytick.color": "#555555", "xtick.labelcolor": "black", "ytick.labelcolor": "black",
    "axes.grid": True, "axes.axisbelow": True, "grid.color": "#e6e6e6", "grid.linewidth": 0.5, "legend.frameon": False,
}  # fmt: skip


def draw(folder: Path, runs: Sequence[RunRecord], charts: Sequence[Chart], panels: Sequence[Panel]) -> list[Path]:
    """Write a picture of each chart and of each figure of a panel into `folder`; returns the files.

    A chart of one of several runs has the run's number in its name. Raises OSError, and UsageError without matplotlib.
    """
    need_matplotlib("--png")
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    files = []
    with matplotlib.rc_context(STYLE):
        for chart in charts:
            files.append(_save(_chart(chart, runs), folder, _name(chart.name, chart.run, runs)))
        for panel in panels:
            for shown in panel.figures:
                if shown.cells is not None:
                    name = _name(f"{panel.name}-{shown.name.replace('_', '-')}", panel.run, runs)
                    files.append(_save(_panel(panel, shown), folder, name))
    return files


def _name(name: str, run: int | None, runs: Sequence[RunRecord]) -> str:
    return name if run is None or len(runs) == 1 else f"{name}-{run + 1}"


def _save(figure: "Figure", folder: Path, name: str) -> Path:
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=DPI)
    return path


def _chart(chart: Chart, runs: Sequence[RunRecord]) -> "Figure":
    figure = new_figure(WIDTH, HEIGHT)
    axes = figure.add_subplot()
    if chart.is_stacked:
        _stack(axes, chart)
    else:
        _lines(axes, chart, runs)
    axes.set_title(
        chart.title if chart.run is None or len(runs) == 1 else f"{chart.title}: {runs[chart.run].name}", loc="left"
    )
    axes.set_ylabel(chart.unit)
    _steps(axes, [series.axis for series in chart.series])
    if chart.is_log:
        from matplotlib.ticker import LogLocator

        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    elif chart.from_zero:
        axes.set_ylim(bottom=0)
    if len(chart.series) > 1:
        handles, labels = axes.get_legend_handles_labels()
        order = slice(None, None, -1 if chart.is_stacked else 1)  # as the areas lie
        axes.legend(handles[order], labels[order], loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _steps(axes: "Axes", shown: Sequence[Axis]) -> None:
    axes.set_xlabel("step")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    ends = [int(axis.step[at]) for axis in shown if len(axis.step) for at in (0, -1)]
    if ends and min(ends) < max(ends):
        axes.set_xlim(min(ends), max(ends))


def _lines(axes: "Axes", chart: Chart, runs: Sequence[RunRecord]) -> None:
    labels = list(dict.fromkeys(series.label for series in chart.series))
    for at, series in enumerate(chart.series):
        one = len(runs) == 1
        colour = COLOURS[(at if one else series.run) % len(COLOURS)]
        style = "-" if one else DASHES[labels.index(series.label) % len(DASHES)]
        label = " ".join(word for word in ("" if one else runs[series.run].name, series.label) if word) or chart.title
        _line(axes, series, colour, style, label, is_smooth=chart.is_smooth and series.label != "held-out")


def _line(axes: "Axes", series: Series, colour: str, style: str, label: str, *, is_smooth: bool) -> None:
    step = series.axis.step
    if series.low is not None and series.high is not None:
        axes.fill_between(step, series.low, series.high, color=colour, alpha=0.15, linewidth=0)
    if is_smooth and len(step) > 4:
        axes.plot(step, series.mean, color=colour, alpha=0.35, linewidth=0.5)
        axes.plot(
            step,
            smoothed(series.mean, math.ceil(len(step) * SMOOTHING)),
            style,
            color=colour,
            linewidth=1.2,
            label=label,
        )
    else:
        marker = "o" if len(step) <= 30 else ""
        axes.plot(step, series.mean, style, color=colour, linewidth=1.0, marker=marker, markersize=2.5, label=label)


def _stack(axes: "Axes", chart: Chart) -> None:
    rows = [np.nan_to_num(series.mean) for series in chart.series]
    colours = [STACK_COLOURS[series.colour % len(STACK_COLOURS)] for series in chart.series]
    axes.stackplot(
        chart.series[0].axis.step, rows, colors=colours, labels=[series.label for series in chart.series], linewidth=0
    )
    axes.grid(False)


def _panel(panel: Panel, shown: PanelFigure) -> "Figure":
    """A heat map."""
    from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize

    assert shown.cells is not None
    values, step = shown.cells.values, shown.cells.axis.step
    figure = new_figure(WIDTH, HEIGHT if len(panel.rows) <= 32 else 1.4 * HEIGHT)
    axes = figure.add_subplot()
    colours = LinearSegmentedColormap.from_list("blues", ["#f3f6fa", "#8db8d9", "#1f5c96", "#0b2f5c"])
    first = step[0] - (step[1] - step[0]) if len(step) > 1 else step[0] - 1
    low, high, _ = colour_limits(values, is_log=shown.is_log)
    mesh = axes.pcolormesh(
        np.concatenate([[first], step]), np.arange(len(panel.rows) + 1) - 0.5, values.T, cmap=colours,
        norm=(LogNorm if shown.is_log else Normalize)(low, high), rasterized=True,
    )  # fmt: skip
    axes.invert_yaxis()
    axes.grid(False)
    axes.set_title(f"{panel.title}: {shown.label}", loc="left")
    axes.set_xlabel("step")
    axes.set_ylabel(panel.row_word)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    every = -(-len(panel.rows) // 16)
    axes.set_yticks(range(0, len(panel.rows), every), panel.rows[::every])
    bar = figure.colorbar(mesh, ax=axes, label=shown.unit, pad=0.01)
    bar.outline.set_visible(False)
    return figure
