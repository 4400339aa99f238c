"""What a trace has for its picture: the first ranks, read event by event in bounded time and memory."""

from array import array
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from collectives.texts import shown
from mpitrain.files import json_of
from mpitrain.job.record.parsing.lines import ERRORS, MOST_RANKS
from mpitrain.job.record.trace.events import COMMUNICATION, LAYERS, PIPELINE, STEPS, WAIT
from mpitrain.job.record.trace.packing import lines_of, no_trace
from mpitrain.job.record.trace.request import MOST_TRACED

MAX_RANKS = 32
_MAX_EVENTS = 500_000
_ARROW = 2
"""The end of an arrow takes the memory of so many other events."""
_MOST_NAME, _MOST_OF_STEP = 200, 40
_KINDS = {"F": "forward", "B": "backward", "I": "backward", "W": "weight gradients"}
_NOT_DRAWN = (b'"cat":"operator"', b'"cat":"kernel"', b'"cat":"in flight"')
_MOST_NOT_DRAWN = 3 * _MAX_EVENTS
"""Operators of torch's profiler, which are passed over unread."""

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


class Drawn:
    """The first MAX_RANKS ranks of a trace. The file has one rank after the other, so it is read up to the next one.

    ValueError if it is no trace, or if these ranks have too many events; OSError: see `packing.read_trace`.
    """

    def __init__(self, trace: Path) -> None:
        self.names: dict[int, str] = {}
        """Of the ranks."""
        self.has_more = False
        """Whether there are further ranks."""
        self.num_ranks: int | None = None
        """Of the whole trace; None if it does not say."""
        self.steps: dict[int, list[tuple[float, str]]] = defaultdict(list)
        """Begins in ms and names, by rank."""
        self._begins: dict[int | str, tuple[float, int]] = {}
        self._ends: dict[int | str, tuple[float, int]] = {}
        self._bars: dict[tuple[str, int], array[float]] = defaultdict(lambda: array("d"))
        self._layers: dict[tuple[str, int], array[float]] = defaultdict(lambda: array("d"))
        self._rows: dict[int, str] = {}
        self._read(trace)
        if not self.names:
            raise no_trace(trace, "it has no ranks")
        if PIPELINE not in self._rows.values():  # else its actions stand for the layers
            for key, spans in self._layers.items():
                self._bars[key].extend(spans)

    def bars(self, kind: str, pid: int) -> npt.NDArray[np.float64]:
        """(n, 2): begins and lengths in ms."""
        return np.array(self._bars.get((kind, pid), array("d"))).reshape(-1, 2)

    def arrows(self) -> list[tuple[tuple[float, int], tuple[float, int]]]:
        """The arrows between ranks that are drawn: begin and end, each with its time in ms and its rank. The longest ones first."""
        found = [(self._begins[number], end) for number, end in self._ends.items() if number in self._begins]
        found = [arrow for arrow in found if all(pid in self.names for _, pid in arrow)]
        return sorted(found, key=lambda arrow: arrow[0][0] - arrow[1][0])

    def _read(self, trace: Path) -> None:
        lines, num, num_passed = lines_of(trace), 0, 0
        try:
            begin = json_of(next(lines, b"") + b"]}")
        except ValueError:
            begin = None
        if not isinstance(begin, dict) or "displayTimeUnit" not in begin:
            raise no_trace(trace, "it begins with something else")
        about = begin.get("otherData")
        ranks = about.get("ranks") if isinstance(about, dict) else None
        self.num_ranks = ranks if type(ranks) is int and 0 < ranks <= MOST_RANKS else None
        for line in lines:
            if any(each in line for each in _NOT_DRAWN):
                num_passed += 1
            else:
                try:
                    event = _event_of(line)
                except ERRORS as error:
                    raise no_trace(trace, error) from None
                if event.name == "process_name" and len(self.names) == MAX_RANKS and event.pid not in self.names:
                    self.has_more = True
                    return
                num += self._take(event)
            if num > _MAX_EVENTS or num_passed > _MOST_NOT_DRAWN:
                raise ValueError(
                    f"{trace}: expected at most {_MAX_EVENTS:,} events of the ranks to draw, and {_MOST_NOT_DRAWN:,} operators; "
                    "trace fewer steps"
                )

    def _take(self, event: _Event) -> int:
        """Keep an event; as how many it counts. One that is not kept counts as well, because it was read."""
        if event.ph == "M" and event.name in ("process_name", "thread_name") and event.args is not None:
            name = shown(str(event.args.name)[:_MOST_NAME])
            if event.name == "process_name":
                self.names[event.pid] = name
            else:
                self._rows[event.tid] = name
        elif event.ph in ("s", "f"):
            (self._begins if event.ph == "s" else self._ends)[event.id] = event.ts / 1e3, event.pid
            return _ARROW
        elif event.ph == "X":
            if event.cat == "step" and len(self.steps[event.pid]) < MOST_TRACED:
                self.steps[event.pid].append((event.ts / 1e3, shown(event.name[:_MOST_OF_STEP])))
            row = self._rows.get(event.tid, "")
            if kind := _kind(event.name, row):
                bars = self._layers if row == LAYERS else self._bars
                bars[kind, event.pid].extend((event.ts / 1e3, event.dur / 1e3))
        return 1


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
