"""A picture of a trace: each rank with its phases, its communication and waits, and the arrows between ranks. Needs matplotlib."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from collectives.shared.pictures import need_matplotlib, new_figure
from collectives.texts import shown
from mpitrain.view.trace.drawn import Drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.path import Path as Outline

_COLOURS = {
    "data": "#bab0ac",
    "forward": "#4c78a8",
    "backward": "#72b7b2",
    "weight gradients": "#9bd0a4",
    "optimizer": "#b279a2",
    "communication": "#f2a541",
    "wait": "#e45756",
}
_MAX_ARROWS, _MAX_STEPS = 400, 50
_HEIGHT = 0.28
_PIXELS = 2000
"""Bars of one kind that are nearer to each other than a pixel are one bar."""


def check(file: Path) -> None:
    """ValueError for a picture of another kind."""
    if file.suffix not in (".svg", ".png"):
        raise ValueError(f"trace: --draw: expected FILE.svg or FILE.png, got {file}")


def draw(trace: Path, file: Path) -> None:
    """Draw a trace to a file. ValueError if `trace` is none or matplotlib is missing; OSError if a file cannot be read or written."""
    need_matplotlib("--draw")
    found = Drawn(trace)
    ranks = sorted(found.names)
    figure = new_figure(13, 1.6 + 0.62 * len(ranks))
    axes = figure.add_subplot()
    places = {pid: -number for number, pid in enumerate(ranks)}
    has_bars = _draw_bars(axes, found, places)
    _draw_arrows(axes, found, places)
    steps = found.steps[ranks[0]]
    for begin, name in steps[:: -(-len(steps) // _MAX_STEPS) or 1]:
        axes.axvline(begin, color="#999999", linewidth=0.6, linestyle=":")
        axes.text(begin, 0.33, name, fontsize="small", va="bottom", parse_math=False)
    axes.set_yticks([places[pid] for pid in ranks], [found.names[pid] for pid in ranks], parse_math=False)
    axes.set_xlabel("ms")
    axes.set_ylim(-len(ranks) + 0.6, 0.6)
    axes.margins(x=0.01)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    title = shown(f"{trace.absolute().parents[1].name}, {trace.name}{_left_out(found)}")
    figure.suptitle(title, fontsize="medium", parse_math=False)
    if has_bars:
        figure.legend(fontsize="small", frameon=False, loc="outside lower center", ncols=len(_COLOURS))
    figure.savefig(file, dpi=120)


def _left_out(found: Drawn) -> str:
    if not found.has_more:
        return ""
    return f", the first {len(found.names)}{'' if found.num_ranks is None else f' of {found.num_ranks:,}'} ranks"


def _draw_bars(axes: "Axes", found: Drawn, places: dict[int, int]) -> bool:
    """The bars of all kinds and ranks; whether there are some. Those of one kind and rank are one outline: a file has few elements."""
    from matplotlib.patches import PathPatch

    all_bars = {(kind, pid): bars for kind in _COLOURS for pid in places if len(bars := found.bars(kind, pid))}
    first = min((float(bars[:, 0].min()) for bars in all_bars.values()), default=0.0)
    last = max((float(bars.sum(axis=1).max()) for bars in all_bars.values()), default=0.0)
    labelled = set()
    for (kind, pid), bars in all_bars.items():
        at = places[pid] - (0.3 if kind in ("communication", "wait") else 0)
        label = None if kind in labelled else kind if kind != "wait" else "wait for another rank"
        labelled.add(kind)
        colour = _COLOURS[kind]
        outline = _outline(joined(bars, (last - first) / _PIXELS), at)
        # The edge keeps short spans visible.
        axes.add_patch(PathPatch(outline, facecolor=colour, edgecolor=colour, linewidth=0.3, label=label))
    return bool(all_bars)


def joined(bars: npt.NDArray[np.float64], least: float) -> npt.NDArray[np.float64]:
    """(n, 2) begins and lengths of bars -> (m, 2) begins and ends, in order. Bars with less than `least` between them are one."""
    bars = bars[np.argsort(bars[:, 0], kind="stable")]
    begin = bars[:, 0]
    end = np.maximum.accumulate(begin + np.maximum(bars[:, 1], 0.0))
    firsts = np.flatnonzero(np.r_[True, begin[1:] > end[:-1] + least])
    return np.stack([begin[firsts], end[np.r_[firsts[1:] - 1, len(bars) - 1]]], axis=1)


def _outline(spans: npt.NDArray[np.float64], at: float) -> "Outline":
    """Rectangles from begin to end each, as one path."""
    from matplotlib.path import Path as Outline

    corners = np.empty((len(spans), 5, 2))
    corners[:, :, 0] = spans[:, [0, 0, 1, 1, 0]]
    corners[:, :, 1] = [at, at + _HEIGHT, at + _HEIGHT, at, at]
    codes = np.tile([Outline.MOVETO, Outline.LINETO, Outline.LINETO, Outline.LINETO, Outline.CLOSEPOLY], len(spans))
    return Outline(corners.reshape(-1, 2), codes)


def _draw_arrows(axes: "Axes", found: Drawn, places: dict[int, int]) -> None:
    """The arrows between ranks, the longest first if they are too many."""
    for (begun, from_pid), (ended, to_pid) in found.arrows()[:_MAX_ARROWS]:
        axes.annotate(
            "",
            (ended, places[to_pid] - 0.16),
            (begun, places[from_pid] - 0.16),
            arrowprops={"arrowstyle": "->", "color": "#333333", "linewidth": 0.5, "shrinkA": 0, "shrinkB": 0},
        )
