"""What the watch knows of a run: the figures of its files, read as they grow, in bounded memory. Nothing is written."""

import math
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from collectives.texts import shown
from mpitrain.files import read_beginning
from mpitrain.job.record.files.events import NAME as EVENTS
from mpitrain.job.record.files.marks import DONE, LOCK, OLD_S, STALE_S, last_launch, read_done
from mpitrain.job.record.pace import Pace
from mpitrain.job.record.parsing.events import read_events, seconds_of
from mpitrain.job.record.parsing.lines import Line
from mpitrain.job.record.parsing.numbers import duration
from mpitrain.job.record.parsing.words import damaged
from mpitrain.view.reading.follow import Follower
from mpitrain.view.reading.run import METRICS, RANKS, SETTINGS, checkpoint_steps, read_settings
from mpitrain.view.watch.ranks import RankFigures
from mpitrain.view.watch.series import Thinned

RUNNING = "running"
RECENT = 4096
"""The last steps are kept one by one, all steps as so many points."""
_RANKS_BYTES = 2 << 20
"""Of ranks.jsonl only the end is read: the table shows the last steps, and the file may have gigabytes."""
_EVENTS = 1000
_MOST_WORDS = 2000
_STILL_S = 10.0
_STILL_STEPS = 5.0


class Status(NamedTuple):
    """What the run does now."""

    words: str
    style: str
    """of rich"""


class Watched:
    """A run in a folder, which may not exist yet. `update` reads what is new."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metrics = Follower(folder / METRICS)
        self._ranks = Follower(folder / RANKS, last_bytes=_RANKS_BYTES, of_ranks=True)
        self._seen: dict[str, float | None] = {}  # the times of files at the last look
        self._step_seen_at: float | None = None  # by the monotonic clock: a step that this process saw to arrive
        self._lock_seen_at: float | None = None
        self._is_first = True
        self._begins: list[dict[str, Any]] = []  # the last one
        self._damaged: list[str] = []  # a note about events
        self._num_damaged = dict.fromkeys((METRICS, RANKS), 0)  # lines
        self.settings: dict[str, Any] = {}
        """By full name, such as train.steps."""
        self.events: list[dict[str, Any]] = []
        self.checkpoint: tuple[int, float] | None = None
        """The step of the last checkpoint, and its time (seconds since 1970)."""
        self.notes: list[str] = []
        """Files that cannot be read now."""
        self._forget_steps()
        self.ranks = RankFigures()

    def _forget_steps(self) -> None:
        self.recent: deque[Line] = deque(maxlen=RECENT)
        """The last steps, without figures of layers."""
        self.first_step: int | None = None
        self.series = {name: Thinned(RECENT) for name in ("loss", "tokens_per_s")}
        self.heldout = Thinned(RECENT)
        self.last_heldout: Line | None = None
        self.best_heldout: tuple[float, int] | None = None
        self.pace = Pace()

    # Reading

    def update(self) -> None:
        """Read what is new in all files. A file that cannot be read is in `notes`, and read the next time."""
        self.notes = []
        self._look(SETTINGS, self._read_settings)
        self._look(EVENTS, self._read_events)
        self.notes += self._damaged
        self._follow(self._metrics, METRICS, self._take_steps)
        self._follow(self._ranks, RANKS, self._take_ranks)
        self._look("checkpoints", self._read_checkpoints)
        if self._has_changed(LOCK):
            self._lock_seen_at = None if self._is_first else time.monotonic()
        self._is_first = False

    def _look(self, name: str, read: Callable[[], None]) -> None:
        """Read a file again if it has changed."""
        try:
            if self._has_changed(name):
                read()
        except (OSError, ValueError) as error:
            self._seen.pop(name, None)
            self.notes.append(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}")

    def _has_changed(self, name: str) -> bool:
        now, before = _changed(self.folder / name), self._seen.get(name)
        self._seen[name] = now
        return now != before

    def _follow(self, follower: Follower, name: str, take: Callable[[list[Line], bool], None]) -> None:
        try:
            while True:
                news = follower.read()
                take(news.lines, news.is_anew)
                self._num_damaged[name] = news.num_damaged + (0 if news.is_anew else self._num_damaged[name])
                if not news.has_more:
                    break
        except OSError as error:
            self.notes.append(f"{name} cannot be read: {error.strerror or error}")
        if num := self._num_damaged[name]:
            self.notes.append(damaged(name, num))

    def _read_settings(self) -> None:
        self.settings = read_settings(self.folder / SETTINGS, self.notes) if self._seen[SETTINGS] is not None else {}

    def _read_events(self) -> None:
        self._damaged = []
        events = read_events(self.folder, self._damaged)
        begins = [event for event in events if event.get("event") == "begin"][-1:]
        if begins != self._begins:
            self.pace.forget()  # the time between two jobs is no time of a step
        self._begins, last = begins, events[-_EVENTS:]
        self.events = last if not begins or begins[0] in last else begins + last

    def _read_checkpoints(self) -> None:
        steps = checkpoint_steps(self.folder)
        saved_at = _changed(self.folder / "checkpoints" / f"step-{steps[-1]:08d}") if steps else None
        self.checkpoint = None if saved_at is None else (steps[-1], saved_at)

    def _take_steps(self, lines: list[Line], is_anew: bool) -> None:
        if is_anew:
            self._forget_steps()
        losses, speeds = self.series["loss"], self.series["tokens_per_s"]
        for line in lines:
            if "heldout_loss" in line:
                self._take_heldout(line)
                continue
            step, loss, speed = line["step"], line.get("loss"), line.get("tokens_per_s")
            if loss is not None:
                losses.add(step, loss)
            if speed is not None:
                speeds.add(step, speed)
        if self.first_step is None:
            self.first_step = next((line["step"] for line in lines if "heldout_loss" not in line), None)
        steps = [line for line in lines[-RECENT:] if "heldout_loss" not in line]
        self.recent.extend({name: value for name, value in line.items() if "/" not in name} for line in steps)
        begun_at = seconds_of(self.begin.get("time"))
        for line in steps:
            if (at := line.get("time")) is not None and not at < begun_at:
                self.pace.add(line["step"], at)
        if steps and not self._is_first:
            self._step_seen_at = time.monotonic()

    def _take_heldout(self, line: Line) -> None:
        self.last_heldout, loss = line, line["heldout_loss"]
        if loss is not None:
            self.heldout.add(line["step"], loss)
            self.best_heldout = min(self.best_heldout or (math.inf, 0), (loss, line["step"]))

    def _take_ranks(self, lines: list[Line], is_anew: bool) -> None:
        if is_anew:
            self.ranks = RankFigures()
        self.ranks.take(lines)

    # What it means

    @property
    def last(self) -> Line | None:
        """The last step."""
        return self.recent[-1] if self.recent else None

    @property
    def steps(self) -> int | None:
        """The number of steps of the whole run, if it is known."""
        steps = self.settings.get("train.steps")
        return steps if isinstance(steps, int) else None

    @property
    def session(self) -> list[dict[str, Any]]:
        """The events since the last begin, resume or recovery."""
        begins = [at for at, event in enumerate(self.events) if event.get("event") == "begin"]
        return self.events[begins[-1] :] if begins else self.events

    @property
    def begin(self) -> dict[str, Any]:
        """The last event of a begin, resume or recovery; empty without one."""
        return next((event for event in reversed(self.events) if event.get("event") == "begin"), {})

    @property
    def hosts(self) -> list[str]:
        """The host of each rank; empty if they are not known."""
        return self.begin.get("hosts") or []

    def silent_s(self) -> float | None:
        """Seconds since the last step; None if that is not known. A clock of another host decides only until a step was seen."""
        if self._step_seen_at is not None:
            return time.monotonic() - self._step_seen_at
        at = (self.last or {}).get("time") or _changed(self.folder / METRICS)
        return None if at is None else max(time.time() - at, 0.0)

    def status(self) -> Status:
        """The state of the run, by the newest of its files."""
        if not os.path.isdir(self.folder):
            return Status("waiting: there is no such folder yet", "yellow")
        stepped, failed, done, locked_at = (
            _changed(self.folder / name) for name in (METRICS, "failure.txt", DONE, LOCK)
        )
        if failed is not None and failed >= max(stepped or 0.0, done or 0.0):
            return Status(f"failed: {self._failure()}", "bold red")
        if done is not None and done >= max(stepped or 0.0, locked_at or 0.0):
            end = read_done(self.folder, last_launch(self.folder))
            return _ended("ended" if end is None else end.reason)
        if locked_at is None and self.session and self.session[-1].get("event") == "end":
            return _ended(self.session[-1].get("reason") or "ended")
        if locked_at is None:
            words = (
                "waiting for a job: none trains in this folder"
                if self.last is None
                else "ended: no job trains in this folder"
            )
            return Status(words, "yellow")
        silent_s = self.silent_s()
        step_s = self.pace.step_s or (self.last or {}).get("step_s") or 0.0
        beat_s = time.time() - locked_at if self._lock_seen_at is None else time.monotonic() - self._lock_seen_at
        if beat_s > _STILL_S and (silent_s is None or silent_s > _STILL_S) and (gone := self._gone()):
            return Status(f"ended without a regular end: {gone}", "bold red")
        if self.last is not None and (silent_s or 0.0) <= max(_STILL_S, _STILL_STEPS * step_s):
            return Status(RUNNING, "bold green")
        if beat_s > (OLD_S if self._lock_seen_at is None else STALE_S):
            return Status(f"no sign of life since {duration(beat_s)}: was the job killed?", "bold red")
        if self.last is None:
            return Status("starting: no step yet", "cyan")
        return Status(f"no step since {duration(silent_s or 0.0)}", "bold yellow")

    def _gone(self) -> str | None:
        """Why no job trains here any more, if this host sees that its process has ended."""
        from mpitrain.job.record.files.folder_lock import (
            Holder,  # the import takes 0.3 s, and most views do not need it
        )

        return Holder(self.folder).is_gone()

    def _failure(self) -> str:
        """The first line of the report. Above it is its time, if a run has written it."""
        try:
            lines = read_beginning(self.folder / "failure.txt").splitlines()
        except OSError as error:
            return f"failure.txt cannot be read: {error.strerror}"
        return next(
            (shown(line.strip()[:_MOST_WORDS]) for line in [*lines[1:], *lines[:1]] if line.strip()),
            "failure.txt is empty",
        )


def _ended(reason: str) -> Status:
    return Status(reason, "green" if reason == "finished" else "yellow")


def _changed(path: Path) -> float | None:
    """The time of the last change (seconds since 1970); None without a file."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None
