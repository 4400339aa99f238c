"""The part of one rank in a trace, in Chrome's trace event format, which Perfetto and chrome://tracing read. Pure: no torch, no MPI.

A rank is a process of the trace, and each of its rows a thread. Slices of a row must nest, and an arrow (flow event) must begin and end
within slices: Perfetto drops what does not. Times are whole ticks of 0.1 us since the begin of the trace.

Perfetto colours a slice by its name without numbers, so all waits for ranks have one colour. chrome://tracing takes `cname`.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

STEPS, PIPELINE, LAYERS, COMMUNICATION, OPERATORS = ROWS = (
    "steps",
    "pipeline",
    "layers",
    "communication",
    "operators",
)
WAIT = "wait for rank"
"""The begin of the name of each wait."""
_TICKS_PER_S = 1e7
_LEAST_TICKS = 2
_WAIT_COLOUR = "terrible"  # chrome://tracing's red


@dataclass
class Slice:
    """A named time on a row. `arrows_out`, `arrows_in`: the ids of the arrows that leave and reach its begin."""

    name: str
    category: str
    begun: int
    ended: int
    args: dict[str, Any] | None = None
    arrows_out: list[int] = field(default_factory=list)
    arrows_in: list[int] = field(default_factory=list)


class RankEvents:
    """The events of one rank. `zero`: the begin of the trace on rank 0's clock, in seconds, as all times of the methods are."""

    def __init__(self, rank: int, host: str, zero: float) -> None:
        self._rank, self._host, self._zero = rank, host, zero
        self._rows: dict[str, list[Slice]] = {}
        self._flights: list[Slice] = []

    def tick(self, time_s: float) -> int:
        """The number of the tick of a time. It never decreases from a time to a later one."""
        return math.floor((time_s - self._zero) * _TICKS_PER_S)

    def slice(
        self, row: str, name: str, category: str, begun: float, ended: float, args: dict[str, Any] | None = None
    ) -> Slice:
        """Add a slice to a row."""
        made = Slice(name, category, self.tick(begun), self.tick(ended), args)
        self._rows.setdefault(row, []).append(made)
        return made

    def in_flight(self, name: str, begun: float, ended: float) -> None:
        """Add an operation that no thread is in. Such times may overlap, so each gets a row of its own where it must."""
        self._flights.append(Slice(name, "in flight", self.tick(begun), self.tick(ended)))

    def text(self) -> str:
        """The events as JSON, one a line, with commas between them."""
        return ",\n".join(json.dumps(each, separators=(",", ":")) for each in self._events())

    def _events(self) -> Iterator[dict[str, Any]]:
        pid = 1000 + self._rank  # 0 is the idle process in Perfetto
        yield _about(pid, None, "process_name", name=f"rank {self._rank} on {self._host}")
        yield _about(pid, None, "process_sort_index", sort_index=self._rank)
        others = sorted(set(self._rows) - set(ROWS))
        for number, row in enumerate([*(row for row in ROWS if row in self._rows), *others]):
            tid = pid * 100 + number
            yield _about(pid, tid, "thread_name", name=row)
            yield _about(pid, tid, "thread_sort_index", sort_index=number)
            for each in nested(self._rows[row]):
                yield from _slice_events(each, {"pid": pid, "tid": tid})
        for number, each in enumerate(self._flights):
            for phase, tick in (("b", each.begun), ("e", max(each.ended, each.begun + 1))):
                at = {"pid": pid, "tid": pid * 100, "ts": tick / 10, "id": f"{self._rank:x}.{number:x}"}
                yield {"ph": phase, "name": each.name, "cat": each.category, **at}


def _about(pid: int, tid: int | None, what: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, **({} if tid is None else {"tid": tid}), "args": args}


def _slice_events(each: Slice, place: dict[str, int]) -> Iterator[dict[str, Any]]:
    event = {"ph": "X", "name": each.name, "cat": each.category, **place, "ts": each.begun / 10}
    event["dur"] = (each.ended - each.begun) / 10
    if each.args:
        event["args"] = each.args
    if each.name.startswith(WAIT):
        event["cname"] = _WAIT_COLOUR
    yield event
    arrow = {"name": "meets", "cat": "arrow", **place, "ts": each.begun / 10}
    yield from ({"ph": "s", "id": number, **arrow} for number in each.arrows_out)
    yield from ({"ph": "f", "bp": "e", "id": number, **arrow} for number in each.arrows_in)


def nested(slices: list[Slice]) -> list[Slice]:
    """The slices in order of time, each at least two ticks long. One that overlaps the end of another cuts this end off."""
    for each in slices:
        each.ended = max(each.ended, each.begun + _LEAST_TICKS)
    ordered = sorted(slices, key=lambda each: (each.begun, -each.ended))
    above: list[Slice] = []
    for each in ordered:
        while above and above[-1].ended < each.ended:
            other = above.pop()
            other.ended = min(other.ended, each.begun)
        above.append(each)
    return ordered
