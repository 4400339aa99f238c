"""The record of a run as arrays: `read_run`. Neither torch nor MPI is imported, and nothing in the folder is changed.

The record may be of a run that is under way, was killed, or is older than a part of the record. So each file and each key may be
missing, and lines may be torn.
"""

import functools
import gc
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from collectives.texts import shown
from collectives.version import newer_release, release
from mpitrain.files import read_toml
from mpitrain.job.record.files.events import NAME as EVENTS
from mpitrain.job.record.parsing.events import read_events, seconds_of
from mpitrain.job.record.parsing.lines import MOST_STEP, read_blocks
from mpitrain.job.record.parsing.settings import flat_settings
from mpitrain.job.record.parsing.words import GRAVE, damaged
from mpitrain.view.reading.tables import Array, Table, TableBuilder

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
                state = event.fields.get("reason") or "ended"
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
        is_run = any(_is_there(path / name) for name in (METRICS, SETTINGS, EVENTS))
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
        with _naming(path / METRICS):
            steps, layers, evaluations = _read_metrics(path / METRICS, notes)
        with _naming(path / RANKS):
            ranks, summaries, gauges, num_ranks = _read_ranks(path / RANKS, notes)
    with _naming(path / EVENTS):
        events = _read_events(path, steps, notes)
    begun: Mapping[str, Any] = next((event.fields for event in reversed(events) if event.kind == "begin"), {})
    if (newer := newer_release(begun.get("release"))) is not None:
        notes.append(f"written by mpitrain {newer}, newer than {release()} here: what is new in it is not shown")
    return RunRecord(
        name=shown(path.name or path.resolve().name),
        folder=path,
        steps=steps,
        layers=layers,
        evaluations=evaluations,
        ranks=ranks,
        summaries=summaries,
        gauges=gauges,
        num_ranks=num_ranks if num_ranks is not None else begun.get("ranks"),
        events=events,
        settings=read_settings(path / SETTINGS, notes),
        checkpoints=checkpoint_steps(path),
        notes=notes,
    )


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """An error of the block becomes an OSError that names the file."""
    try:
        yield
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise OSError(f"{file} cannot be read: {why}") from None


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
    of_steps, of_layers, of_evaluations = TableBuilder(), TableBuilder(most_names=100_000), TableBuilder()
    num_damaged = 0
    for block, num in read_blocks(path):
        num_damaged += num
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
        notes.append(damaged(path.name, num_damaged))
    tables = [of_steps.table(), of_layers.table(), of_evaluations.table()]
    for table in tables:
        table.columns.pop("step", None)
    return tables[0], tables[1], tables[2]


@functools.lru_cache(1000)
def _names_of_layers(names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of a line's names that are figures of layers. Most lines have the same names, so the cache saves the time."""
    return tuple(name for name in names if is_of_layers(name))


def _read_ranks(path: Path, notes: list[str]) -> tuple[Table, Table, Table, int | None]:
    """The figures of all ranks, summaries, gauges, and the number of ranks at last."""
    builders = {name: TableBuilder(of_lists=True) for name in ("ranks", "summary", "gauges")}
    num_ranks, num_damaged = None, 0
    for block, num in read_blocks(path, of_ranks=True):
        num_damaged += num
        for name, builder in builders.items():
            lines = [line for line in block if name in line]
            builder.add([line["step"] for line in lines], [line[name] for line in lines])
        if block:
            num_ranks = block[-1].get("num_ranks", num_ranks)
    if num_damaged:
        notes.append(damaged(path.name, num_damaged))
    ranks, summary, gauges = (builder.table() for builder in builders.values())
    return ranks, summary, gauges, num_ranks


def _read_events(folder: Path, steps: Table, notes: list[str]) -> list[Event]:
    times = steps.column("time")
    is_known = np.isfinite(times)
    known_times, known_steps = times[is_known], steps.step[is_known]
    events = []
    for line in read_events(folder, notes):
        time, step = seconds_of(line.get("time")), line.get("step")
        if step is None and math.isfinite(time) and len(known_times):
            done = int(np.searchsorted(known_times, time, side="right"))
            step = int(known_steps[done - 1]) if done else int(known_steps[0]) - 1
        events.append(
            Event(
                kind=line.get("event") or "?",
                time=time,
                step=step,
                rank=line.get("rank"),
                host=line.get("host"),
                cost_s=line.get("cost_s"),
                fields=line,
            )
        )
    return events


def read_settings(path: Path, notes: list[str]) -> dict[str, Any]:
    """The settings as they are in the file, without secrets: those of another version are no error."""
    try:
        return flat_settings(read_toml(path))
    except FileNotFoundError:
        notes.append(f"there is no {path.name}")
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror or error}")
    except ValueError as error:
        notes.append(f"{path.name} cannot be read: {shown(str(error))}")
    return {}


def checkpoint_steps(folder: Path) -> list[int]:
    """The names of checkpoints only: `ckpt` would read the manifest of each, and import h5py."""
    try:
        names = os.listdir(folder / "checkpoints")
    except OSError:
        return []
    found = (int(match[1]) for name in names if (match := re.fullmatch(r"step-(\d+)", name)))
    return sorted(step for step in found if step <= MOST_STEP)
