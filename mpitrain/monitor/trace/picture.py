"""A picture of a trace: each rank with its phases, its communication and waits, and the arrows between ranks. Needs matplotlib."""

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from collectives.bench.kit.pictures import new_figure
from collectives.commands.terminal import UsageError
from collectives.texts import shown
from mpitrain.monitor.reading.lines import ERRORS
from mpitrain.monitor.trace.events import COMMUNICATION, LAYERS, PIPELINE, STEPS, WAIT
from mpitrain.monitor.trace.packing import lines_of, no_trace

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
_MAX_RANKS, _MAX_ARROWS, _MAX_EVENTS = 32, 400, 1_000_000
_MOST_NAME = 200


def check(file: Path) -> None:
    """ValueError for a picture of another kind."""
    if file.suffix not in (".svg", ".png"):
        raise ValueError(f"trace: --draw: expected FILE.svg or FILE.png, got {file}")


def draw(trace: Path, file: Path) -> None:
    """Draw a trace to a file. ValueError if `trace` is none or matplotlib is missing; OSError if a file cannot be read or written."""
    found = _Found(trace)
    shown_ranks = sorted(found.names)[:_MAX_RANKS]
    try:
        figure = new_figure(13, 1.6 + 0.62 * len(shown_ranks))
    except UsageError:
        raise ValueError("trace: --draw needs matplotlib: pip install 'mpitrain[plot]'") from None
    axes = figure.add_subplot()
    places = {pid: -number for number, pid in enumerate(shown_ranks)}
    for kind, colour in _COLOURS.items():
        label: str | None = kind if kind != "wait" else "wait for another rank"
        for (of, pid), spans in found.bars.items():
            if of == kind and pid in places:
                at = places[pid] - (0.3 if kind in ("communication", "wait") else 0)
                # The edge keeps short spans visible.
                axes.broken_barh(spans, (at, 0.28), facecolor=colour, edgecolor=colour, linewidth=0.3, label=label)
                label = None
    _draw_arrows(axes, found, places)
    for each in found.steps:
        if each.pid == shown_ranks[0]:
            axes.axvline(each.ts / 1e3, color="#999999", linewidth=0.6, linestyle=":")
            axes.text(each.ts / 1e3, 0.33, shown(each.name), fontsize="small", va="bottom", parse_math=False)
    axes.set_yticks([places[pid] for pid in shown_ranks], [found.names[pid] for pid in shown_ranks], parse_math=False)
    axes.set_xlabel("ms")
    axes.set_ylim(-len(shown_ranks) + 0.6, 0.6)
    axes.margins(x=0.01)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    num = len(found.names)
    left_out = f", the first {len(shown_ranks)} of {num} ranks" if len(shown_ranks) < num else ""
    title = shown(f"{trace.absolute().parents[1].name}, {trace.name}{left_out}")
    figure.suptitle(title, fontsize="medium", parse_math=False)
    if any(pid in places for _, pid in found.bars):
        figure.legend(fontsize="small", frameon=False, loc="outside lower center", ncols=len(_COLOURS))
    figure.savefig(file, dpi=120)


_Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Us = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]


class _Args(msgspec.Struct):
    name: Any = ""


class _Event(msgspec.Struct):
    """What the picture needs of an event: see events.py."""

    ph: str
    name: str
    pid: _Number
    tid: _Number = 0
    ts: _Us = 0.0
    dur: _Us = 0.0
    cat: str = ""
    id: _Number | str = 0
    args: _Args | None = None


_event_of = msgspec.json.Decoder(_Event).decode


class _Found:
    """What a trace has for the picture. ValueError if it is no trace, or has too many events; OSError: see `read_trace`."""

    def __init__(self, trace: Path) -> None:
        self.names: dict[int, str] = {}
        """Of the ranks."""
        self.steps: list[_Event] = []
        self.begins: dict[int | str, _Event] = {}
        """Of arrows, by their ids."""
        self.ends: dict[int | str, _Event] = {}
        self.bars: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
        """Begins and lengths in ms, by kind and rank."""
        self._layers: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
        self._rows: dict[int, str] = {}
        lines, num = lines_of(trace), 0
        if not next(lines, b"").startswith(b'{"displayTimeUnit"'):
            raise no_trace(trace, "it begins with something else")
        for line in lines:
            try:
                num += self._take(_event_of(line))
            except ERRORS as error:
                raise no_trace(trace, error) from None
            if num > _MAX_EVENTS:
                raise ValueError(f"{trace}: expected at most {_MAX_EVENTS:,} events to draw; trace fewer steps")
        if not self.names:
            raise no_trace(trace, "it has no ranks")
        if PIPELINE not in self._rows.values():  # else its actions stand for the layers
            for key, spans in self._layers.items():
                self.bars[key] += spans

    def _take(self, event: _Event) -> bool:
        """Keep an event; whether it was kept."""
        if event.ph == "M" and event.name in ("process_name", "thread_name") and event.args is not None:
            name = shown(str(event.args.name)[:_MOST_NAME])
            if event.name == "process_name":
                self.names[event.pid] = name
            else:
                self._rows[event.tid] = name
            return True
        if event.ph in "sf":
            (self.begins if event.ph == "s" else self.ends)[event.id] = event
            return True
        if event.ph != "X":
            return False
        if event.cat == "step":
            self.steps.append(event)
        row = self._rows.get(event.tid, "")
        kind = _kind(event.name, row)
        if kind:
            bars = self._layers if row == LAYERS else self.bars
            bars[kind, event.pid].append((event.ts / 1e3, event.dur / 1e3))
        return bool(kind) or event.cat == "step"


def _kind(name: str, row: str) -> str:
    """What a slice counts as in the picture; "" if it is not shown."""
    if row.startswith(COMMUNICATION):
        return "wait" if name.startswith(WAIT) else "communication"
    if row == STEPS:
        return name if name in ("data", "optimizer") else ""
    if row == PIPELINE:
        return _KINDS.get(name[:1], "")
    if row == LAYERS:
        return "forward" if name.startswith("forward ") else "backward"
    return ""


def _draw_arrows(axes: "Axes", found: _Found, places: dict[int, int]) -> None:
    """The arrows between ranks, the longest first if they are too many."""
    arrows = [(found.begins[number], end) for number, end in found.ends.items() if number in found.begins]
    arrows = [arrow for arrow in arrows if all(each.pid in places for each in arrow)]
    arrows.sort(key=lambda arrow: arrow[0].ts - arrow[1].ts)
    for begin, end in arrows[:_MAX_ARROWS]:
        axes.annotate(
            "",
            (end.ts / 1e3, places[end.pid] - 0.16),
            (begin.ts / 1e3, places[begin.pid] - 0.16),
            arrowprops={"arrowstyle": "->", "color": "#333333", "linewidth": 0.5, "shrinkA": 0, "shrinkB": 0},
        )
