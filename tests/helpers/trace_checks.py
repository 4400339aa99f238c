"""A strict check of a trace against Chrome's trace event format, as Perfetto reads it. What this check refuses, Perfetto would drop."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpitrain.job.record.trace.packing import read_trace

Event = dict[str, Any]


def checked(file: Path, num_ranks: int) -> list[Event]:
    """The events of the trace in a file."""
    events: list[Event] = read_trace(file)["traceEvents"]
    check(events)
    names = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert [name.split(" on ")[0] for _, name in sorted(names.items())] == [f"rank {rank}" for rank in range(num_ranks)]
    return events


def check(events: Sequence[Event]) -> None:
    """AssertionError for slices that do not nest, arrows outside slices or back in time, and rows without a name."""
    rows: dict[tuple[int, int], list[Event]] = defaultdict(list)
    flights: Counter[tuple[str, str, int, str]] = Counter()
    arrows: dict[int, dict[str, Event]] = defaultdict(dict)
    named = {(each["pid"], each["tid"]) for each in events if each["name"] == "thread_name"}
    for each in events:
        assert isinstance(each["name"], str), each
        assert isinstance(each["pid"], int) and each["pid"] > 0, each
        if each["ph"] == "M":
            assert each["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index"), each
            continue
        assert each["ts"] >= 0, each
        assert (each["pid"], each["tid"]) in named, each
        assert round(each["ts"] * 10) == each["ts"] * 10, each
        if each["ph"] == "X":
            assert each["dur"] > 0, each
            rows[each["pid"], each["tid"]].append(each)
        elif each["ph"] in ("s", "f"):
            assert each["ph"] not in arrows[each["id"]], f"two ends of one arrow: {each}"
            arrows[each["id"]][each["ph"]] = each
            assert each["ph"] == "s" or each["bp"] == "e"
            # A slice that begins at the same time must come before in the file, else Perfetto does not know it yet.
            row = rows[each["pid"], each["tid"]]
            assert any(has(slice_, each["ts"]) for slice_ in row[-500:]), f"an arrow outside slices: {each}"
        else:
            assert each["ph"] in ("b", "e"), each
            flights[each["cat"], each["id"], each["pid"], each["name"]] += 1 if each["ph"] == "b" else -1
    assert not any(flights.values()), "each async time has an end"
    for row in rows.values():
        above: list[Event] = []
        for each in sorted(row, key=lambda slice_: (slice_["ts"], -slice_["dur"])):
            while above and end(above[-1]) <= tick(each["ts"]):
                above.pop()
            assert not above or end(each) <= end(above[-1]), f"{each} overlaps the end of {above[-1]}"
            above.append(each)
    for ends in arrows.values():
        assert set(ends) == {"s", "f"}, ends
        assert (ends["s"]["name"], ends["s"]["cat"]) == (ends["f"]["name"], ends["f"]["cat"])
        assert ends["s"]["ts"] < ends["f"]["ts"], f"an arrow back in time: {ends}"


def tick(us: float) -> int:
    return round(us * 10)


def end(slice_: Event) -> int:
    return tick(slice_["ts"]) + tick(slice_["dur"])


def has(slice_: Event, us: float) -> bool:
    return tick(slice_["ts"]) <= tick(us) < end(slice_)
