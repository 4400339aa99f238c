"""The events of a run that is tested."""

from pathlib import Path
from typing import Any

from mpitrain.job.record.files.events import REGULAR
from mpitrain.job.record.parsing.events import read_events


def faults(folder: Path) -> list[dict[str, Any]]:
    """The events that a run without faults has not."""
    return [event for event in read_events(folder) if event["event"] not in REGULAR]
