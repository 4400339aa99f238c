"""RUN/events.jsonl: one JSON object per line for each event of a run.

The events of every run are begin, save and end; those of some runs are skip, spike, straggler, trace, sink (one that has failed),
failure, shrink, restore, relaunch, rewind, desync and flipped_bit.

Each line has `time` (UTC, ISO 8601), `event`, `rank` and `host` (null if the event concerns no single rank) and `cost_s` (the seconds
that the run lost by the event; null if it is not known). Further fields depend on the event. Only one process writes at a time:
rank 0, the supervisor after the end of its job, or the rank that reports the failure which ends a job. reading/events.py reads them.
"""

import datetime
import json
from pathlib import Path
from typing import Any

from mpitrain.files import adding, write_all

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
    with adding(folder / NAME) as file:
        write_all(file, json.dumps(line).encode() + b"\n")
    return line
