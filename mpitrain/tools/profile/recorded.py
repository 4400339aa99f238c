"""`profile RUN`: what the record of a run tells of its steps, and the layers of RUN/profile.json if it is there. No torch, no MPI."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from rich.console import RenderableType

from collectives.shared.tables import plural
from mpitrain.files import read
from mpitrain.job.config import Config, of_run
from mpitrain.job.record.files.metrics import PARTS
from mpitrain.job.record.machine.machine import Machine
from mpitrain.job.record.machine.memory import node_bytes
from mpitrain.job.record.parsing.lines import ERRORS, MOST_FIGURE
from mpitrain.tools.profile.advice import Advised, advised
from mpitrain.tools.profile.fitting import Figures, figures_of
from mpitrain.tools.profile.memory_kinds import KINDS as MEMORY_KINDS
from mpitrain.tools.profile.memory_kinds import HeldMemory
from mpitrain.tools.profile.parts import KINDS, LAYERS, Parts
from mpitrain.tools.profile.sentences import sentences
from mpitrain.tools.profile.table import of_layers, of_memory, of_ranks
from mpitrain.view.reading.run import SETTINGS, Event, RunRecord, read_run
from mpitrain.view.reading.tables import Array, Table

_MOST_STEPS = 1000
_MOST_SLOW = 20
"""Ranks that are named."""
_MOST_SEARCHED = {"ranks": 1 << 17, "train.batch": 1 << 20, "train.accumulate": 1 << 20, "blocks": 1 << 12}
"""Numbers for which layouts are searched."""
_MOST_BYTES = 64 << 20
"""Of a profile: a thousand blocks on a thousand ranks."""
PROFILE = "profile.json"


@dataclass(frozen=True)
class Recorded:
    """What the record of a run tells. `notes`: what it does not tell, and why."""

    parts: Parts
    found: list[str]
    advice: Advised | None
    notes: list[str]


def recorded(record: RunRecord, machine: Machine | None = None) -> Recorded:
    """The last steps of a run. ValueError if it has done none."""
    notes = [*record.notes]
    config, last = _config(record, notes), _last_rows(record)
    num_ranks = last.num_ranks or 1
    parts = _parts(last, config, notes)
    if not 0 < parts.step_s < MOST_FIGURE:
        raise ValueError(f"{record.folder}: expected steps that take time, got {parts.step_s:g} s a step")
    found = [*_stragglers(last.events), *sentences(parts)]
    if parts.num_ranks == 1 and last.num_ranks != 1:
        found = [
            *_stragglers(last.events),
            "Waits are not known: the record has no figures of all ranks (ranks.jsonl).",
        ]
    advice = None
    if config is not None and any(parts.of("passes", "forward")):
        fields = last.begun
        num_nodes = len(set(fields.get("hosts") or [""]))
        is_cpu = fields.get("device", "cpu") == "cpu"
        flops = fields.get("flops_per_s")
        if machine is None and (flops is None or not is_cpu):
            notes.append("what to try: the record does not tell the machine; --machine NAME|FILE gives it")
        else:
            memory = fields.get("memory_bytes_of_rank")
            if memory is None and machine is None:
                notes.append("what to try: the record does not tell the memory of a rank, so this host's was taken")
            memory = memory or node_bytes() / max(num_ranks // num_nodes, 1)
            own_flops = (flops or num_ranks * 1e12) / num_ranks
            figures = figures_of(parts, own_flops, num_nodes, memory=memory, is_cpu=is_cpu)
            advice = _advised(config, num_ranks, figures, machine, notes)
    return Recorded(parts, found, advice, notes)


def _advised(
    config: Config, num_ranks: int, figures: Figures, machine: Machine | None, notes: list[str]
) -> Advised | None:
    """See `advised`; None for settings or figures that no run has."""
    sizes, train = config.model.resolve(), config.train
    numbers = {
        "ranks": num_ranks,
        "train.batch": train.batch,
        "train.accumulate": train.accumulate,
        "blocks": sizes.layers,
    }
    for name, its in numbers.items():
        if its > _MOST_SEARCHED[name]:
            notes.append(
                f"what to try: {name} {its:,}: expected at most {_MOST_SEARCHED[name]:,} to search for layouts"
            )
            return None
    try:
        return advised(config, num_ranks, figures, machine)
    except (ValueError, ArithmeticError) as error:
        notes.append(f"what to try: {error}")
        return None


def tables_of_run(folder: str, machine: Machine | None) -> tuple[Recorded, list[RenderableType]]:
    """What `profile RUN` shows. ValueError or OSError for a folder that has no steps, or a file that cannot be read."""
    record = read_run(folder)
    of = recorded(record, machine)
    tables: list[RenderableType] = [of_layers(of.parts, every_block=False)]
    if of.parts.num_ranks > 1:
        tables.append(of_ranks(of.parts))
    layers = Path(folder) / PROFILE
    if os.path.lexists(layers):
        tables += _saved(layers)
    else:
        of.notes.append(
            f"by layer: mpirun -np {record.num_ranks or 'N'} python -m mpitrain profile --config {folder}/config.toml --json {layers}"
        )
    return of, tables


def _saved(path: Path) -> Iterator[RenderableType]:
    """The tables of a profile that `--json` wrote."""
    try:
        saved = msgspec.json.decode(read(path, most_bytes=_MOST_BYTES), type=_Saved)
        saved.check()
        held = [HeldMemory(**msgspec.structs.asdict(each)) for each in saved.memory]
        yield of_layers(saved.parts, every_block=False, of=f"{path.name}: ")
        yield of_memory(held, every_block=False)
    except OSError as error:
        raise OSError(f"{path} cannot be read: {error.strerror or error}") from None
    except (*ERRORS, ValueError, ArithmeticError) as error:
        raise ValueError(
            f"{path}: expected the file of profile --json, got something else ({error}); remove it or write it again"
        ) from None


_Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _SavedMemory(msgspec.Struct):
    layers: dict[str, dict[str, _Bytes]]
    others: dict[str, _Bytes]
    peak: _Bytes
    moment: str


class _Saved(msgspec.Struct):
    """What `profile --json` writes, as far as the tables need it."""

    parts: Parts
    memory: list[_SavedMemory]

    def check(self) -> None:
        """ValueError for layers that no model has, or lists that are not of all ranks."""
        num = self.parts.num_ranks
        for layer, kinds in self.parts.layers.items():
            if layer not in LAYERS and not re.fullmatch(r"blocks\.\d{1,6}", layer, re.ASCII):
                raise ValueError(f"a layer {layer!r:.50}")
            for kind, seconds in kinds.items():
                if kind not in KINDS or len(seconds) != num or not all(0 <= each <= MOST_FIGURE for each in seconds):
                    raise ValueError(f"{kind!r:.50} of {layer}, expected {num} times of {', '.join(KINDS)}")
        if not num or not self.parts.step_s > 0 or not self.memory:
            raise ValueError("no step, or no memory")
        if any(set(kinds) != set(MEMORY_KINDS) for each in self.memory for kinds in each.layers.values()):
            raise ValueError(f"other kinds of memory than {', '.join(MEMORY_KINDS)}")


def _config(record: RunRecord, notes: list[str]) -> Config | None:
    """The settings; None, with a note, without them. Those of a folder that cannot be read have a note already."""
    if not record.settings:
        return None
    try:
        return of_run(record.folder / SETTINGS)  # those of the record are texts to be shown
    except ValueError as error:
        notes.append(f"what to try: {error}")
        return None


class _Rows(NamedTuple):
    """The last steps with the same ranks: rows of a table."""

    table: Table
    rows: Array
    begun: Mapping[str, Any]
    """The fields of the event with which they began; empty if there is none."""
    events: list[Event]
    """From it on, for ranks have other numbers before it."""
    num_ranks: int | None
    """Of the run in these steps; None if it is not known."""
    num_columns: int
    """Ranks with figures: all, or rank 0 alone."""

    def of(self, name: str, rows: Array) -> Array:
        """The figures of some rows, (rows, num_columns); NaN where a figure is not known."""
        if (column := self.table.columns.get(name)) is None:
            return np.full((len(rows), self.num_columns), np.nan)
        return column[rows].reshape(len(rows), -1)[:, : self.num_columns]


def _last_rows(record: RunRecord) -> _Rows:
    """The steps after the last begin that has some: after a recovery a run may have fewer ranks, with other numbers."""
    table = record.ranks if "forward_s" in record.ranks.columns else record.steps
    if not len(table) or "step_s" not in table.columns:
        raise ValueError(f"{record.folder}: expected the record of at least one step, got none")
    last = table.step[-1]
    begins = [
        at
        for at, event in enumerate(record.events)
        if event.kind == "begin" and event.step is not None and event.step < last
    ]
    events = record.events[begins[-1] :] if begins else record.events
    first, fields = (events[0].step or 0, dict(events[0].fields)) if begins else (0, dict[str, Any]())
    # The first steps after a start take longer.
    rows = np.flatnonzero(table.step > first + 3)[-_MOST_STEPS:]
    rows = rows if len(rows) else np.arange(len(table))[-1:]
    num_ranks = fields.get("ranks") or record.num_ranks
    num_columns = table.columns["step_s"].reshape(len(table), -1).shape[1]
    return _Rows(table, rows, fields, events, num_ranks, min(num_columns, num_ranks or num_columns))


def _parts(last: _Rows, config: Config | None, notes: list[str]) -> Parts:
    """The mean of those of the last steps that took a middle time, of all ranks where they are known, else of rank 0."""
    table, rows = last.table, last.rows
    step_s = last.of("step_s", rows)
    whole = ~np.isnan(step_s).any(axis=1)
    rows, step_s = (rows[whole], step_s[whole]) if whole.any() else (rows[-1:], np.nan_to_num(step_s[-1:]))
    order = np.argsort(step_s.max(axis=1))
    rows = rows[order[len(order) // 4 : len(order) - len(order) // 4]]
    num_ranks = step_s.shape[1]

    def means(name: str) -> Array:
        means: Array = np.nan_to_num(last.of(name, rows)).mean(axis=0, dtype=np.float64)
        return means

    layers: dict[str, dict[str, list[float]]] = {}
    for name, part in PARTS.items():
        if part != "communication" and any(own := means(name)):
            layer, kind = ("passes", part) if part in ("forward", "backward") else (part, "own work")
            layers.setdefault(layer, {})[kind] = own.tolist()
    stages = _stages(config, num_ranks)
    comm = np.nan_to_num(last.of("comm_s", rows)).astype(np.float64)
    least = np.stack([comm[:, [s == stage for s in stages]].min(axis=1) for stage in stages], axis=1)
    if num_ranks > 1:
        layers["communication"] = {
            "transfer": least.mean(axis=0).tolist(),
            "wait": (comm - least).mean(axis=0).tolist(),
        }
    else:
        layers["communication"] = {"transfer": comm.mean(axis=0).tolist()}
    known = np.sum([row for kinds in layers.values() for row in kinds.values()], axis=0)
    layers["other"] = {"own work": np.maximum(means("step_s") - known, 0).tolist()}
    if not any("forward" in kinds for kinds in layers.values()):
        notes.append("forward and backward: the record is of an older version, and has no figures of them")
    if num_ranks == 1 and (last.num_ranks or 1) > 1:
        notes.append("the figures are those of rank 0")
    known_cpu = {name: means(f"{name}_s").tolist() for name in ("cpu", "delay") if f"{name}_s" in table.columns}
    return Parts(layers, stages, len(rows), hidden=means("comm_hidden_s").tolist(), **known_cpu)


def _stages(config: Config | None, num_ranks: int) -> list[int]:
    """The stages of a pipeline are farthest apart."""
    count = config.parallel.pipeline if config is not None and num_ranks % config.parallel.pipeline == 0 else 1
    return [rank * count // num_ranks for rank in range(num_ranks)]


def _stragglers(events: Sequence[Event]) -> Iterator[str]:
    """The slow ranks that the run itself has found, each with its last words."""
    found = [event for event in events if event.kind == "straggler"]
    last, counts = {event.rank: event for event in found}, Counter(event.rank for event in found)
    for rank, count in counts.most_common(_MOST_SLOW):
        event = last[rank]
        words = str(event.fields.get("words") or f"rank {rank} was slow, cause: {event.fields.get('cause', 'unknown')}")
        yield f"Slow rank {rank}, found {plural(count, 'time')}, last at step {event.step}: {words}"
    if len(counts) > _MOST_SLOW:
        yield f"{len(counts) - _MOST_SLOW:,} more ranks were found slow."
