"""A picture of a trace: each rank with its phases, its communication and waits, and the arrows between ranks. Needs matplotlib."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collectives.bench.kit.pictures import new_figure
from collectives.commands.terminal import UsageError
from mpitrain.monitor.trace.events import COMMUNICATION, LAYERS, PIPELINE, STEPS, WAIT
from mpitrain.monitor.trace.packing import read_trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {
    "data": "#bab0ac",
    "forward": "#4c78a8",
    "backward": "#72b7b2",
    "weight gradients": "#9bd0a4",
    "optimizer": "#b279a2",
    "communication": "#f2a541",
    "wait": "#e45756",
}
_KINDS = {"F": "forward", "B": "backward", "I": "backward", "W": "weight gradients"}
_MAX_RANKS, _MAX_ARROWS = 32, 400
_Event = dict[str, Any]


def check(file: Path) -> None:
    """ValueError for a picture of another kind."""
    if file.suffix not in (".svg", ".png"):
        raise ValueError(f"trace: --draw: expected FILE.svg or FILE.png, got {file}")


def draw(trace: Path, file: Path) -> None:
    """Draw a trace to a file. ValueError if `trace` is none or matplotlib is missing; OSError if the file cannot be written."""
    content = read_trace(trace)
    events: list[_Event] = content["traceEvents"]
    names = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    rows = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    shown = sorted(names)[:_MAX_RANKS]
    try:
        figure = new_figure(13, 1.6 + 0.62 * len(shown))
    except UsageError:
        raise ValueError("trace: --draw needs matplotlib: pip install 'mpitrain[plot]'") from None
    axes = figure.add_subplot()
    places = {pid: -number for number, pid in enumerate(shown)}
    mine = [each for each in events if each["pid"] in places and each["ph"] != "M"]
    has_pipeline = PIPELINE in rows.values()
    bars: dict[tuple[str, float], list[tuple[float, float]]] = defaultdict(list)
    for each in mine:
        if each["ph"] != "X" or not (kind := _kind(each, rows[each["tid"]], has_pipeline)):
            continue
        lower = kind in ("communication", "wait")
        bars[kind, places[each["pid"]] - (0.3 if lower else 0)].append((each["ts"] / 1e3, each["dur"] / 1e3))
    for kind, colour in _COLOURS.items():
        label: str | None = kind if kind != "wait" else "wait for another rank"
        for (of, at), spans in bars.items():
            if of == kind:
                # The edge keeps short spans visible.
                axes.broken_barh(spans, (at, 0.28), facecolor=colour, edgecolor=colour, linewidth=0.3, label=label)
                label = None
    _draw_arrows(axes, mine, places)
    for each in mine:
        if each["ph"] == "X" and each["cat"] == "step" and each["pid"] == shown[0]:
            axes.axvline(each["ts"] / 1e3, color="#999999", linewidth=0.6, linestyle=":")
            axes.text(each["ts"] / 1e3, 0.33, each["name"], fontsize="small", va="bottom")
    axes.set_yticks([places[pid] for pid in shown], [names[pid] for pid in shown])
    axes.set_xlabel("ms")
    axes.set_ylim(-len(shown) + 0.6, 0.6)
    axes.margins(x=0.01)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    left_out = f", the first {len(shown)} of {len(names)} ranks" if len(shown) < len(names) else ""
    figure.suptitle(f"{trace.absolute().parents[1].name}, {trace.name}{left_out}", fontsize="medium")
    figure.legend(fontsize="small", frameon=False, loc="outside lower center", ncols=len(_COLOURS))
    figure.savefig(file, dpi=120)


def _kind(each: _Event, row: str, has_pipeline: bool) -> str:
    """What a slice counts as in the picture; "" if it is not shown."""
    name = str(each["name"])
    if row.startswith(COMMUNICATION):
        return "wait" if name.startswith(WAIT) else "communication"
    if row == STEPS:
        return name if name in ("data", "optimizer") else ""
    if row == PIPELINE:
        return _KINDS.get(name[:1], "")
    if row == LAYERS and not has_pipeline:
        return "forward" if name.startswith("forward ") else "backward"
    return ""


def _draw_arrows(axes: "Axes", events: Iterable[_Event], places: dict[int, int]) -> None:
    """The arrows between ranks, the longest first if they are too many."""
    begins, ends = ({each["id"]: each for each in events if each["ph"] == phase} for phase in "sf")
    arrows = [(begins[number], end) for number, end in ends.items() if number in begins]
    arrows.sort(key=lambda arrow: arrow[0]["ts"] - arrow[1]["ts"])
    for begin, end in arrows[:_MAX_ARROWS]:
        axes.annotate(
            "",
            (end["ts"] / 1e3, places[end["pid"]] - 0.16),
            (begin["ts"] / 1e3, places[begin["pid"]] - 0.16),
            arrowprops={"arrowstyle": "->", "color": "#333333", "linewidth": 0.5, "shrinkA": 0, "shrinkB": 0},
        )
