"""The checkpoints of the main job: model, optimizer, position in the data, random states, settings.

With slices a checkpoint has no random states, because each forward is seeded by the step and the slice.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import ckpt
from ckpt.storage.local import in_a_line
from collectives import Communicator
from mpitrain.job.config import (
    CheckpointConfig,
    Config,
    ConfigError,
    ParallelConfig,
    differences,
    from_text,
    packed_settings,
    public,
    to_toml,
    unpacked_settings,
)
from mpitrain.job.elastic.lease import Lease
from mpitrain.job.record.conditions import changes_of_bits, of_checkpoint
from mpitrain.job.train.checkpoints import random_states
from mpitrain.job.train.checkpoints.meta import checked, wires_of
from mpitrain.models import LanguageModel
from mpitrain.placement.rank0 import on_rank0
from mpitrain.plans.draws import seed_all
from mpitrain.sharding import DiLoCo
from mpitrain.sharding.ranks import chosen_format
from mpitrain.sharding.unit.unit import diloco_of
from mpitrain.weights import state

_RANDOM = "random/states"
_WIRES = ("wire", "wire_weights")
"""Settings of `parallel`, of which a checkpoint has what "auto" has chosen."""


class Resumed(NamedTuple):
    """The point from which a run continues. `stepper`, `health`: their state_dict. `remarks`: lines about differences from the saved
    run."""

    step: int  # steps done
    next_sample: int  # samples of the training data seen
    documents: dict[str, Any]  # of `RankBatches.state`; empty without documents
    tensors: dict[str, np.ndarray]  # the same
    stepper: dict[str, Any]
    remarks: list[str]
    health: dict[str, Any]


def collect(
    model: LanguageModel,
    optimizer: torch.optim.Optimizer,
    *,
    config: Config,
    parallel: ParallelConfig,
    comm: Communicator,
    step: int,
    next_sample: int,
    stepper: dict[str, Any],
    health: dict[str, Any],
    fingerprint: str,
    data: tuple[dict[str, Any], dict[str, Any]],
    hardware: dict[str, Any],
    lease: Lease | None = None,
) -> state.Collected:
    """The state after `step` steps. `parallel`: of `settle_wires`. `data`: of `RankBatches.state`. `hardware`: of
    `Hardware.described`. Collective if the model is a pipeline."""
    meta: dict[str, Any] = {
        "step": step,
        **_conditions(config, comm, hardware),
        "data": {"fingerprint": fingerprint, "seed": config.train.seed, "next_sample": next_sample},
    }
    if any(getattr(config.parallel, name) != "fp32" for name in _WIRES):
        meta["wires"] = {**{name: getattr(parallel, name) for name in _WIRES}, "num_nodes": comm.num_nodes}
    if data[0]:
        meta["data"]["documents"] = data[0]
    if stepper:
        meta["stepper"] = stepper
    if lease is not None:  # of an elastic run
        meta |= {"lease": lease.number, "lease_run": lease.run}
    if health:
        meta["health"] = health
    tensors = dict(data[1])
    if not config.train.slices:
        rows = random_states.pack(_device(model))
        tensors[_RANDOM] = ckpt.Shard(rows, (comm.size, rows.shape[1]), (comm.rank, 0))
    return state.collect(model, optimizer, meta=meta, tensors=tensors)


def _conditions(config: Config, comm: Communicator, hardware: dict[str, Any]) -> dict[str, Any]:
    """What the bits of a run depend on, besides its state: a part of the meta. `mpitrain.job.record.conditions` reads it."""
    return {
        "config": packed_settings(to_toml(public(config))),
        "num_ranks": comm.size,
        "collectives": comm.table.to_dict(),  # the choice of algorithms decides the order of additions
        "hardware": hardware,
    }


def write(
    path: Path, collected: state.Collected, settings: CheckpointConfig, before_commit: Callable[[], None]
) -> None:
    """Write a checkpoint. Collective. A checkpoint of this name is replaced: this run did not continue from it.

    `before_commit`: see `ckpt.save`.
    """
    ckpt.save(
        path, collected.tensors, comm=collected.comm, meta=collected.meta, overwrite=True, files=settings.num_files,
        driver=settings.driver, background=settings.background, copies=settings.copies, keep=settings.keep,
        keep_every=settings.keep_every or None, private=settings.private, before_commit=before_commit,
    )  # fmt: skip


def load(
    source: state.StoredState,
    model: LanguageModel,
    optimizer: torch.optim.Optimizer | None,
    *,
    config: Config,
    parallel: ParallelConfig,
    comm: Communicator,
    fingerprint: str,
    seed_of: int,
    hardware: dict[str, Any],
    room: Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]]], dict[str, np.ndarray]],
    is_own: bool,
) -> Resumed:
    """Load a state that `save` wrote on any number of ranks. Collective. `parallel`: of `settle_wires`. `hardware`: of
    `Hardware.described`. `room`: see `RankBatches.room`.

    `is_own`: of this run. From the state of another run the model goes on with other data, too, which begin anew.

    The optimizer's settings, such as the learning rate, come from `config`. Random states are loaded only on the same number of ranks,
    and without slices. `seed_of`: a number with which this rank's generators are seeded if they get no state.
    ckpt.CheckpointError on all ranks if it is missing, damaged or not of the main job; ConfigError if it has another model.
    """
    meta, shapes = on_rank0(comm, lambda: _read(source))
    with comm.together():
        saved = from_text(unpacked_settings(meta["config"]), str(source))
        _check_model(saved, config, source)
        if optimizer is not None and saved.optim.name != config.optim.name:
            raise ConfigError(
                f"{source} has the state of optim.name {saved.optim.name}, here {config.optim.name}; continue with its optimizer, or "
                "start another run with --run"
            )
        documents = meta["data"].get("documents", {})
        try:
            of_data = room(documents, shapes)
            other_data = ""
        except ValueError as error:
            if is_own:
                raise ConfigError(str(error)) from None
            documents, of_data, other_data = {}, {}, f"the data begin anew: {error}"
            meta.get("health", {}).pop("left_out", None)  # of the other data
    remarks = _take_table(meta.get("collectives"), comm)
    step, device = meta["step"], _device(model)
    rows = random_states.pack(device)
    tensors = {}
    there, here = (
        (n, c.parallel.tensor, c.parallel.pipeline) for n, c in ((meta["num_ranks"], saved), (comm.size, config))
    )
    has_states = not saved.train.slices and not config.train.slices
    if has_states and there == here:
        tensors[_RANDOM] = ckpt.Shard(rows, (comm.size, rows.shape[1]), (comm.rank, 0))
    state.load(source, model, optimizer, tensors={**tensors, **of_data}, hyperparameters=False)
    if (diloco := diloco_of(model)) is not None:
        remarks += _of_copies(diloco, meta)
    if tensors:
        with comm.together():
            try:
                random_states.unpack(rows, device)
            except (RuntimeError, ValueError) as error:
                raise ckpt.CheckpointError(f"{source}: its random states are none: {in_a_line(error)}") from None
    elif not config.train.slices:
        seed_all(config.train.seed + step, seed_of)
        then, now = (
            f"{n} rank{'s' * (n > 1)}"
            + f", {tensor} a layer" * (tensor > 1)
            + f", {stages} in a pipeline" * (stages > 1)
            for n, tensor, stages in (there, here)
        )
        differs = f"it was saved by {then}, now {now}" if has_states else "it was saved with train.slices"
        remarks.append(f"{differs}: random generators get new seeds")
    if other_data:
        remarks.append(other_data)
    elif meta["data"]["fingerprint"] != fingerprint:
        remarks.append("the data have changed since it was saved: the order of the samples differs from now on")
    for name in _WIRES:
        then, now = meta.get("wires", {}).get(name), getattr(parallel, name)
        if getattr(config.parallel, name) == "auto" and then not in (None, now):
            remarks.append(f"parallel.{name}: auto was {then} when it was saved, and is {now} now")
    for line in differences(public(saved), public(config)):
        if not line.startswith(("run:", "resume:", "log.", "train.eval_only")):
            remarks.append(f"setting changed: {line}")
    if not config.train.eval_only:
        changes = changes_of_bits(of_checkpoint(meta), of_checkpoint(_conditions(config, comm, hardware)))
        if meta["data"]["fingerprint"] == fingerprint:  # the same data at another place
            changes = [each for each in changes if each.name != "data.path"]
        if changes:
            remarks.append(
                "from here on the bits may differ from those of a run without this stop (train.slices), because of "
                + ", ".join(map(str, changes))
            )
    return Resumed(
        step, meta["data"]["next_sample"], documents, of_data, meta.get("stepper", {}), remarks, meta.get("health", {})
    )  # fmt: skip


def _of_copies(diloco: DiLoCo, meta: Mapping[str, Any]) -> list[str]:
    """Let the local steps go on after a load. Returns a remark if the copies are others than those saved."""
    if "diloco" not in meta:
        diloco.restart(meta["step"])
        return []
    there, here = meta["diloco"].get("copies"), diloco.num_copies
    if not diloco.is_local or there is None or there == here:
        return []
    copies = f"{there} cop{'ies' if there > 1 else 'y'}"
    return [f"it was saved by {copies} in local steps, now {here}: docs/network-local-steps.md tells what each takes"]


def _take_table(table: Any, comm: Communicator) -> list[str]:
    """Let "auto" choose the same algorithms as when the checkpoint was saved. Returns a remark if this is not possible."""
    if table is None:
        return []
    try:
        comm.use_table(table)
    except ValueError as error:  # on all ranks: the table is from another version of `collectives`
        return [f"collectives are chosen again, so last digits may differ: {error}"]
    return []


def settle_wires(parallel: ParallelConfig, comm: Communicator, start: Path | ckpt.Url | None) -> ParallelConfig:
    """The settings with the formats that are used, the same on all ranks. Collective.

    On one node these are fp32. In place of "auto" it is the format with which the checkpoint `start` was trained, so that a resume
    gives the same bits. Without one, or on other numbers of ranks or nodes, whose sums have other bits anyway, it is measured.
    """
    if comm.num_nodes == 1:
        return replace(parallel, wire="fp32", wire_weights="fp32")
    asked = [name for name in _WIRES if getattr(parallel, name) == "auto"]
    if not asked:
        return parallel
    kept = on_rank0(comm, lambda: wires_of(start, comm.size, comm.num_nodes))
    found: dict[str, Any] = {name: kept.get(name) or chosen_format(comm, "auto") for name in asked}
    return replace(parallel, **found)


def _read(source: state.StoredState) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """The checked meta of a source, and the shapes of its tensors of the data."""
    there = source.entries()
    shapes = {entry.name: entry.shape for entry in there.values() if entry.name.startswith("data/")}
    return checked(there.meta, source), shapes


def _device(model: LanguageModel) -> torch.device:
    return next(model.parameters()).device


def _check_model(saved: Config, config: Config, source: state.StoredState) -> None:
    there, here = ({"family": each.model.family} for each in (saved, config))
    if there == here:
        there, here = (asdict(each.model.resolve()) for each in (saved, config))
    if different := [f"model.{key} is {there[key]} there, {here[key]} here" for key in here if there[key] != here[key]]:
        raise ConfigError(
            f"{source} is of another model: {', '.join(different)}; continue with its settings, or start another run with --run"
        )
