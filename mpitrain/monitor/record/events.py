"""RUN/events.jsonl: one JSON object per line for each event of a run.

The events of every run are begin, save and end; those of some runs are skip, spike, straggler, trace, sink (one that has failed),
failure, shrink, restore, relaunch, rewind, desync and flipped_bit.

Each line has `time` (UTC, ISO 8601), `event`, `rank` and `host` (null if the event concerns no single rank) and `cost_s` (the seconds
that the run lost by the event; null if it is not known). Further fields depend on the event. Only one process writes at a time:
rank 0, the supervisor after the end of its job, or the rank that reports the failure which ends a job.
"""

import datetime
import json
from pathlib import Path
from typing import Any

NAME = "events.jsonl"
REGULAR = frozenset({"begin", "save", "skip", "trace", "end"})
"""The events of a run without faults."""


def write_event(
    folder: Path,
    event: str,
    *,
    rank: int | None = None,
    host: str | None = None,
    cost_s: float | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """Append one event to the file of the run in `folder`, in one write, and return it. OSError if the file cannot be written."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    line = {"time": now, "event": event, "rank": rank, "host": host, "cost_s": cost_s, **fields}
    with (folder / NAME).open("a") as file:
        file.write(json.dumps(line) + "\n")
    return line


def read_events(folder: Path) -> list[dict[str, Any]]:
    """The events of a run, oldest first; a last line that was cut by a crash is left out. Empty without a file."""
    try:
        lines = (folder / NAME).read_text().splitlines()
    except FileNotFoundError:
        return []
    events = []
    for line in lines:
        try:
            events.append(json.loads(line))
        except ValueError:
            continue
    return events
