"""The conditions of runs, which are the settings and the hardware, and what a change of each can do to the numbers. Pure.

docs/reproducibility.md gives the reason for each effect.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Any, NamedTuple

from mpitrain.files import toml_of
from mpitrain.job.config.packing import unpacked_settings
from mpitrain.job.record.parsing.events import typed
from mpitrain.job.record.parsing.settings import flat_settings


class Effect(StrEnum):
    """What a change of a condition can do."""

    VALUES = "may change values"
    BITS = "may change bits"
    KEPT = "keeps bits, by train.slices"
    NONE = "none"


class Conditions(NamedTuple):
    """The conditions of a run, by name."""

    hardware: dict[str, Any]
    settings: dict[str, Any]
    """Empty if they are not known."""


class Condition(NamedTuple):
    """A condition that differs. A value is empty where it is unset or unknown."""

    name: str
    a: str
    b: str
    effect: Effect

    def __str__(self) -> str:
        return f"{self.name} {self.a or 'unset'} -> {self.b or 'unset'}"


_SLICES = "train.slices"
_OF_ORDER = {"train.accumulate", "train.elastic", _SLICES}
"""Settings of training that change only the order of sums. Those of `parallel` do, but for the following ones."""
_OF_VALUES = {
    "parallel.param_dtype", "parallel.reduce_dtype", "parallel.wire", "parallel.wire_weights", "parallel.compress",
    "parallel.compress_rank", "parallel.compress_share", "parallel.compress_feedback", "parallel.local_steps", "parallel.outer",
    "parallel.outer_lr", "parallel.outer_momentum", "parallel.exact_steps",
}  # fmt: skip
_HARMLESS = {
    "run", "resume", "parallel.bind", "data.processes", "data.cache", "data.cache_bytes", "train.min_ranks", "train.copy_every",
    "train.check_every", "train.eval_every", "train.eval_only", "train.sample_bytes", "train.sample_prompt", "train.sample_temperature",
}  # fmt: skip
_KEPT_BY_SLICES = {
    "ranks", "hosts", "algorithms", "layout.pp", "layout.dp_replicate", "layout.dp_shard", "parallel.stage", "parallel.copies",
    "parallel.storage", "parallel.pipeline", "parallel.schedule", "parallel.stages_per_rank", "parallel.reshard_after_forward",
    "parallel.checkpoint_activations", "parallel.partition_activations", "parallel.offload_activations", "train.accumulate",
    "train.elastic",
}  # fmt: skip
"""With `train.slices` the sums over ranks have one order, and the same operations are computed again."""
_FOLLOW = {"parallel.threads": "threads", "parallel.device": "device"}
"""Settings that say nothing if the hardware is known, and the hardware that follows from them."""


def effect_of(name: str, *, has_slices: bool) -> Effect:
    """The effect of a change. has_slices: both runs have slices; their number is a condition of its own."""
    section = name.partition(".")[0]
    if name in _HARMLESS or section in ("checkpoint", "log"):
        return Effect.NONE
    if has_slices and name in _KEPT_BY_SLICES:
        return Effect.KEPT
    if name in _OF_VALUES or (section in ("model", "data", "optim", "train") and name not in _OF_ORDER):
        return Effect.VALUES
    return Effect.BITS


def differing(a: Conditions, b: Conditions) -> list[Condition]:
    """The conditions that differ, the harmless ones last. Settings that are known of one run alone are left out."""
    has_slices = bool(a.settings.get(_SLICES) and b.settings.get(_SLICES))
    rows = settings_of([a.hardware, b.hardware])
    if a.settings and b.settings:
        rows += settings_of([a.settings, b.settings])
    found = [
        Condition(name, values[0], values[1], effect_of(name, has_slices=has_slices))
        for name, values, differs in rows
        if differs and not {_FOLLOW.get(name)} & a.hardware.keys() & b.hardware.keys()
    ]
    return sorted(found, key=lambda each: each.effect is Effect.NONE)


def changes_of_bits(then: Conditions, now: Conditions) -> list[Condition]:
    """What can change the bits of a run that was saved and goes on now. Empty without slices: then nobody expects the same bits.

    Hardware that is unknown, as of older checkpoints, is left out.
    """
    if not (then.settings.get(_SLICES) or now.settings.get(_SLICES)):
        return []
    known = then.hardware.keys() & now.hardware.keys()
    its = [
        each._replace(hardware={name: value for name, value in each.hardware.items() if name in known})
        for each in (then, now)
    ]
    return [each for each in differing(*its) if each.effect in (Effect.VALUES, Effect.BITS)]


def of_start(event: Mapping[str, Any]) -> dict[str, Any]:
    """The hardware of a start or a resume, from the fields of its event `begin`."""
    hosts, layout, environment = (event.get(name) for name in ("hosts", "layout", "environment"))
    found = {name: event[name] for name in ("ranks", "threads", "device") if event.get(name) is not None}
    if hosts is not None:
        found["hosts"] = len(set(hosts))
    return found | {f"layout.{name}": size for name, size in (layout or {}).items()} | (environment or {})


def of_checkpoint(meta: Mapping[str, Any], num_ranks: int = 0) -> Conditions:
    """Of the run that saved a checkpoint: its settings, the hardware, and the table of algorithms, as far as the meta has them.

    `num_ranks`: from the manifest, for checkpoints of other programs; 0 if it is unknown.
    """
    hardware: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    if isinstance(number := meta.get("num_ranks", num_ranks), int) and number:
        hardware["ranks"] = number
    if isinstance(its := meta.get("hardware"), dict):
        hardware |= of_start(typed(its | {"event": "begin"}))
    if isinstance(table := meta.get("collectives"), dict):  # what `auto` takes for each collective
        digest = hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()
        hardware["algorithms"] = f"table {digest[:8]}"
    if isinstance(text := meta.get("config"), str):
        with suppress(ValueError):
            settings = flat_settings(toml_of(unpacked_settings(text)))
    return Conditions(hardware, settings)


def settings_of(runs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str], bool]]:
    """(name, the value in each run, whether the values differ) of each setting, in the order of the files. `runs`: their settings."""
    names = dict.fromkeys(name for run in runs for name in run)
    rows = []
    for name in names:
        values = [_text(run[name]) if name in run else "" for run in runs]
        rows.append((name, values, len(set(values)) > 1))
    return rows


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
