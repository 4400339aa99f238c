"""The record of a run as arrays: `read_run`. Neither torch nor MPI is imported, and nothing in the folder is changed.

The record may be of a run that is under way, was killed, or is older than a part of the record. So each file and each key may be
missing, and lines may be torn.
"""

import datetime
import functools
import gc
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpitrain.monitor.reading.lines import read_blocks
from mpitrain.monitor.reading.tables import Array, Table, TableBuilder
from mpitrain.monitor.reading.words import GRAVE, counted
from mpitrain.monitor.record.events import NAME as EVENTS
from mpitrain.monitor.record.events import read_events

METRICS, RANKS, SETTINGS = "metrics.jsonl", "ranks.jsonl", "config.toml"
SUMMARY = ("min", "median", "max", "worst rank")
"""The figures of a summary, which stands in place of all ranks' values from 64 ranks on."""
LAYER_KINDS = ("grad_norm", "param_norm", "update_ratio", "zeros")
"""Figures of layers have names KIND/LAYER."""


NO_END = "no end recorded"
"""The state of a run that goes on or was killed."""


class Event(NamedTuple):
    """A line of events.jsonl."""

    kind: str
    time: float
    """Unix seconds; NaN if unknown."""
    step: int | None
    """The event's own step, else the number of steps that were done at its time; None if both are unknown."""
    rank: int | None
    host: str | None
    cost_s: float | None
    fields: Mapping[str, Any]
    """All fields of the line."""


class RunRecord(NamedTuple):
    """What is known of a run."""

    name: str
    folder: Path
    steps: Table
    """Figures of each step as numbers (n,); `skipped` is 1 for a skipped step. Without those of layers."""
    layers: Table
    """Figures of layers (KIND/LAYER) and `logit_entropy`, of the steps that have some."""
    evaluations: Table
    ranks: Table
    """Figures of ranks (n, ranks), seconds or bytes; from 64 ranks on of every 100th step. NaN for ranks that the step did not have."""
    summaries: Table
    """Figures of SUMMARY (n, 4), of runs from 64 ranks on; else empty."""
    gauges: Table
    """Gauges of ranks (n, ranks), of the steps that sampled them."""
    num_ranks: int | None
    """The number of ranks at last; None if unknown."""
    events: list[Event]
    settings: dict[str, Any]
    """The settings by full name, such as optim.lr."""
    checkpoints: list[int]
    """The steps of the checkpoints on disk."""
    notes: list[str]
    """What could not be read."""

    @property
    def time(self) -> Array:
        """Unix seconds at the end of each step, (n,); NaN if unknown."""
        return self.steps.column("time")

    @property
    def state(self) -> str:
        """How the last part of the run ended: the reason of its end, "failed", or NO_END. Empty without events of these."""
        state = ""
        for event in self.events:
            if event.kind in ("begin", "restore", "relaunch", "rewind"):
                state = NO_END
            elif event.kind == "end":
                state = str(event.fields.get("reason") or "ended")
            elif event.kind in GRAVE and state in ("", NO_END):
                state = "failed"
        return state

    def last(self, kind: str) -> Event | None:
        """The last event of a kind."""
        return next((event for event in reversed(self.events) if event.kind == kind), None)


def read_run(folder: str | os.PathLike[str]) -> RunRecord:
    """The record of the run in `folder`.

    Raises:
        ValueError: the folder is none of a run.
        OSError: a file cannot be read.
    """
    path = Path(folder)
    try:
        is_run = any((path / name).is_file() for name in (METRICS, SETTINGS, EVENTS))
    except OSError as error:
        raise OSError(f"{path} cannot be read: {error.strerror or error}") from None
    if not is_run:
        found = "a folder without them" if path.is_dir() else "a file" if path.exists() else "no such folder"
        raise ValueError(
            f"{path}: expected the folder of a run, with {METRICS}, {SETTINGS} or {EVENTS}, got {found}; "
            "give the folder that --run named in training"
        )
    notes: list[str] = []
    with _no_collections():
        steps, layers, evaluations = _read_metrics(path / METRICS, notes)
        ranks, summaries, gauges, num_ranks = _read_ranks(path / RANKS)
    events = _read_events(path, steps)
    begun = next((event.fields.get("ranks") for event in reversed(events) if event.kind == "begin"), None)
    return RunRecord(
        name=path.name or path.resolve().name,
        folder=path,
        steps=steps,
        layers=layers,
        evaluations=evaluations,
        ranks=ranks,
        summaries=summaries,
        gauges=gauges,
        num_ranks=num_ranks if num_ranks is not None else begun if isinstance(begun, int) else None,
        events=events,
        settings=read_settings(path / SETTINGS, notes),
        checkpoints=checkpoint_steps(path),
        notes=notes,
    )


@contextmanager
def _no_collections() -> Iterator[None]:
    """Turn off the garbage collector in the block. A block of lines is a million objects without circles, which it would look at for
    half of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def is_of_layers(name: str) -> bool:
    """Whether a name in metrics.jsonl is a figure of layers."""
    kind, slash, _ = name.partition("/")
    return name == "logit_entropy" or (bool(slash) and kind in LAYER_KINDS)


def _read_metrics(path: Path, notes: list[str]) -> tuple[Table, Table, Table]:
    """The figures of steps, of layers, and of evaluations. A run may have a thousand figures of layers in few steps: they are apart."""
    of_steps, of_layers, of_evaluations = TableBuilder(), TableBuilder(), TableBuilder()
    num_damaged = 0
    for block, damaged in read_blocks(path):
        num_damaged += damaged
        evaluations = [line for line in block if "heldout_loss" in line]
        of_evaluations.add([line["step"] for line in evaluations], evaluations)
        steps = [line for line in block if "heldout_loss" not in line] if evaluations else block
        layers = [
            (line["step"], {name: line.pop(name) for name in names})
            for line in steps
            if (names := _names_of_layers(tuple(line)))
        ]
        of_layers.add([step for step, _ in layers], [figures for _, figures in layers])
        of_steps.add([line["step"] for line in steps], steps)
    if num_damaged:
        notes.append(
            f"{path.name} has {counted(num_damaged, 'damaged line')}, which {'is' if num_damaged == 1 else 'are'} left out"
        )
    tables = [of_steps.table(), of_layers.table(), of_evaluations.table()]
    for table in tables:
        table.columns.pop("step", None)
    return tables[0], tables[1], tables[2]


@functools.cache
def _names_of_layers(names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of a line's names that are figures of layers. Most lines have the same names, so the cache saves the time."""
    return tuple(name for name in names if is_of_layers(name))


def _read_ranks(path: Path) -> tuple[Table, Table, Table, int | None]:
    """The figures of all ranks, summaries, gauges, and the number of ranks at last."""
    builders = {name: TableBuilder(of_lists=True) for name in ("ranks", "summary", "gauges")}
    num_ranks = None
    for block, _ in read_blocks(path):
        for name, builder in builders.items():
            lines = [line for line in block if isinstance(line.get(name), dict)]
            builder.add([line["step"] for line in lines], [line[name] for line in lines])
        if block:
            last = block[-1]
            lists = [value for value in (last.get("ranks") or {}).values() if isinstance(value, list)]
            num_ranks = last.get("num_ranks") or (len(lists[0]) if lists else None) or num_ranks
    ranks, summary, gauges = (builder.table() for builder in builders.values())
    return ranks, summary, gauges, num_ranks


def _read_events(folder: Path, steps: Table) -> list[Event]:
    times = steps.column("time")
    is_known = np.isfinite(times)
    known_times, known_steps = times[is_known], steps.step[is_known]
    events = []
    for line in read_events(folder):
        if not isinstance(line, dict):
            continue
        time = seconds_of(line.get("time"))
        step = _number(line.get("step"))
        if step is None and math.isfinite(time) and len(known_times):
            done = int(np.searchsorted(known_times, time, side="right"))
            step = int(known_steps[done - 1]) if done else int(known_steps[0]) - 1
        host = line.get("host")
        events.append(
            Event(
                kind=str(line.get("event", "?")),
                time=time,
                step=None if step is None else int(step),
                rank=None if (rank := _number(line.get("rank"))) is None else int(rank),
                host=None if host is None else str(host),
                cost_s=_number(line.get("cost_s")),
                fields=line,
            )
        )
    return events


def seconds_of(text: Any) -> float:
    """The time of an event in seconds since 1970; NaN if it is none."""
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError):
        return math.nan


def _number(value: Any) -> float | None:
    is_one = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if is_one else None


def read_settings(path: Path, notes: list[str]) -> dict[str, Any]:
    """The settings as they are in the file: those of another version are no error."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        notes.append(f"there is no {path.name}")
        return {}
    except ValueError as error:
        notes.append(f"{path.name} cannot be read: {error}")
        return {}
    return flat_settings(document)


def flat_settings(document: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a TOML document by their full names."""
    found: dict[str, Any] = {}
    for name, value in document.items():
        found |= {f"{name}.{key}": its for key, its in value.items()} if isinstance(value, dict) else {name: value}
    return found


def checkpoint_steps(folder: Path) -> list[int]:
    """The names of checkpoints only: `ckpt` would read the manifest of each, and import h5py."""
    try:
        names = os.listdir(folder / "checkpoints")
    except OSError:
        return []
    return sorted(int(found[1]) for name in names if (found := re.fullmatch(r"step-(\d+)", name)))
