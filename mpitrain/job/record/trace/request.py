"""RUN/.trace: a request for a trace while the run trains, and its answer.

    {"id", "steps", "time", "timeout_s", "state": "asked"}    by the command
    {..., "state": "taken"}                                   by rank 0 of the run, which traces
    {..., "state": "done", "path", "problem"}                 by rank 0: the file of the trace, or why there is none

Each writer replaces the file, so a reader sees one of them as a whole. The command removes it. If the command was killed, the request
stays, and is void `timeout_s` seconds after its `time` (unix time). The clocks of two hosts must differ by less than that.
"""

import time
import uuid
from pathlib import Path
from typing import NamedTuple

from mpitrain.files import read_object
from mpitrain.job.config.settings import MOST_TRACED as MOST_TRACED
from mpitrain.job.record.files.marks import number, whole, write

NAME = ".trace"
EVERY_S = 1.0
"""Seconds between two looks of a run. More looks would burden a file system of many nodes."""


class Request(NamedTuple):
    """The content of the file."""

    id: str
    steps: int
    time: float
    timeout_s: float
    state: str
    path: str = ""
    problem: str = ""

    @property
    def is_open(self) -> bool:
        """Whether a command waits for an answer."""
        return self.state != "done" and time.time() <= self.time + self.timeout_s


def read(folder: Path) -> Request | None:
    """The request in a run's folder; None without one."""
    try:
        found = read_object(folder / NAME)
        return Request(
            str(found["id"]),
            whole(found["steps"]),
            number(found["time"]),
            number(found["timeout_s"]),
            str(found["state"]),
            str(found.get("path", "")),
            str(found.get("problem", "")),
        )
    except (OSError, ValueError, KeyError):
        return None


def ask(folder: Path, steps: int, *, timeout_s: float) -> Request:
    """Leave a request, for which the caller waits so many seconds. OSError if the folder cannot be written."""
    asked = Request(uuid.uuid4().hex, steps, time.time(), timeout_s, "asked")
    write(folder / NAME, asked._asdict())
    return asked


def withdraw(folder: Path, asked: Request) -> None:
    """Remove a request, if it is still this one."""
    there = read(folder)
    if there is not None and there.id == asked.id:
        (folder / NAME).unlink(missing_ok=True)


class TraceRequests:
    """The requests that rank 0 of a run sees."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._looked_at = folder, -float("inf")
        self._served: Request | None = None

    def look(self) -> int:
        """The number of steps that are asked for; 0: nothing new, or the last look was less than a second ago."""
        now = time.monotonic()
        if now - self._looked_at < EVERY_S:
            return 0
        self._looked_at = now
        found = read(self._folder)
        # "taken" by an earlier job, or before a loss of ranks, is open still.
        if (
            found is None
            or not found.is_open
            or not 1 <= found.steps <= MOST_TRACED
            or (self._served and found.id == self._served.id)
        ):
            return 0
        self._served = found
        return found.steps

    def is_withdrawn(self) -> bool:
        """Whether the command that is served does not wait any more. False if the last look was less than a second ago."""
        now = time.monotonic()
        if self._served is None or now - self._looked_at < EVERY_S:
            return False
        self._looked_at = now
        found = read(self._folder)
        return found is None or found.id != self._served.id

    def answer(self, state: str, path: str = "", problem: str = "") -> None:
        """Tell the command, unless it has given up. OSError if the folder cannot be written."""
        served, there = self._served, read(self._folder)
        if served is not None and there is not None and there.id == served.id:
            write(self._folder / NAME, served._replace(state=state, path=path, problem=problem)._asdict())
