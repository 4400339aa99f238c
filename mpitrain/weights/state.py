"""Model and optimizer <-> checkpoint: the name of each tensor in the checkpoint, and the box of it that this rank holds.

- `model/NAME`: parameters and buffers. `ema/NAME`: their averages (kinds/model.py).
- `optimizer/KEY/NAME`: the optimizer's state KEY of a parameter (kinds/optimizer.py).
- `outer_momentum/...`, `copies/...`: of local steps, what each copy of the model has of its own (kinds/by_copy.py).
- `compression/KEY/NAME`: the state of `compress_gradients` (saved_compression.py).
- `extra_state/N/NAME`: large tensors in the extra state of modules (saved_extra.py).

With `only=` a checkpoint has those of some NAMEs alone (chosen.py).

A scalar parameter has a shard of shape (1,) on one rank and (0,) on the others, since no scalar can be empty. In a checkpoint it is
a scalar as in the plain model, and the box of the one rank is the whole tensor.
"""

import os
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

import ckpt
from ckpt.format.manifest import named
from ckpt.ranks import ranks_of
from ckpt.saving.background import wait_before_load
from ckpt.storage.places import copies_of
from ckpt.views import plain
from collectives import Communicator
from mpitrain.placement.parts import stages_of
from mpitrain.placement.rank0 import on_rank0
from mpitrain.sharding import EMA
from mpitrain.sharding.buffers import lacks_memory, with_memory
from mpitrain.sharding.unit.unit import compression_of, diloco_of
from mpitrain.weights.agreed import agreed_optimizer
from mpitrain.weights.buffers import as_on_first_holder, warn_of_differences
from mpitrain.weights.chosen import Chosen, choose
from mpitrain.weights.held import of_one_rank
from mpitrain.weights.kinds.by_copy import SavedCopies
from mpitrain.weights.kinds.compression import Read, SavedCompression
from mpitrain.weights.kinds.extra import SavedExtraState
from mpitrain.weights.kinds.kind import Saved, look
from mpitrain.weights.kinds.model import SavedModel
from mpitrain.weights.kinds.optimizer import SavedOptimizer, names_of
from mpitrain.weights.meta import user_meta
from mpitrain.weights.meta.parts import SAVED_ONLY
from mpitrain.weights.stages import with_other_stages
from mpitrain.weights.targets import holders_of, is_first_holder, ranks_of_model


@runtime_checkable
class StoredState(Protocol):
    """A stored state: a checkpoint, or copies in node memory."""

    def entries(self) -> ckpt.Checkpoint:
        """The names, shapes and dtypes of its tensors, and its meta. Only rank 0 calls it."""

    def load(self, tensors: Mapping[str, Any], *, comm: Communicator | None, **options: Any) -> dict[str, Any]:
        """Fill `tensors` as `ckpt.load` does; returns the meta. Collective."""


class OnDisk:
    """The StoredState that is a checkpoint. `copies`: places of copies of it."""

    def __init__(self, path: str | os.PathLike[str], copies: Sequence[str | os.PathLike[str]] | None = None) -> None:
        copies_of(path, copies)  # an error of the arguments comes here, on all ranks
        self._path, self._copies = path, copies

    def __str__(self) -> str:
        return os.fspath(self._path)

    def entries(self) -> ckpt.Checkpoint:
        return ckpt.open(self._path, copies=self._copies)

    def wait(self, comm: Communicator | None) -> None:
        """Wait for a save in the background of this checkpoint by the same ranks. Collective."""
        wait_before_load(self._path, ranks_of(comm))

    def load(self, tensors: Mapping[str, Any], *, comm: Communicator | None, **options: Any) -> dict[str, Any]:
        return ckpt.load(self._path, tensors, comm=comm, copies=self._copies, **options)


class Collected(NamedTuple):
    """A state that is ready to be stored, by all ranks of `comm`: tensors for `ckpt.save`, in host memory, and a meta."""

    tensors: dict[str, Any]
    meta: dict[str, Any]
    comm: Communicator | None


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    meta: Mapping[str, Any] | None = None,
    ema: EMA | None = None,
    tensors: Mapping[str, Any] | None = None,
    only: str | Sequence[str] | None = None,
    comm: Communicator | None = None,
    **options: Any,
) -> None:
    """Write a checkpoint of a model, its optimizer and an average of its weights. Collective over the ranks of a sharded model.

    Buffers, such as BatchNorm's statistics, are those of data rank 0: `sync_buffers` makes them the same. So are ignored parameters,
    with their state in the optimizer. The state of `compress_gradients` and of `DiLoCo` belongs to the model. In local steps the
    model's tensors are the outer parameters: see kinds/by_copy.py.

    `optimizer`: None on a stage of a pipeline that trains nothing, if other stages have one. `comm`: for a model that is not sharded,
    the ranks that all hold this model and make this call; None: only this process saves.
    `meta`: a dict of the program. Values of JSON are in the file as they are, those that JSON does not have are encoded
    (user_meta.py). ValueError on all ranks for the keys of mpitrain itself, TypeError for other values. `tensors`: further tensors in
    the form of `ckpt.save`. The options (`files`, `driver`, `background`, `copies`, `keep`, `keep_every`, `overwrite`, `private`) and
    the errors are those of `ckpt.save`.

    `only`: a pattern of names of parameters and buffers, such as "*lora*", or several. Only these are saved, with their state in the
    optimizer and their average, as for a model whose base is frozen; a module takes its buffers along. The stages of a pipeline may
    pass different patterns: those of all count. ValueError on all ranks if a pattern matches nothing.
    """
    state = collect(model, optimizer, meta=meta, ema=ema, tensors=tensors, only=only, comm=comm)
    ckpt.save(path, state.tensors, comm=state.comm, meta=state.meta, **options)


def collect(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    meta: Mapping[str, Any] | None = None,
    ema: EMA | None = None,
    tensors: Mapping[str, Any] | None = None,
    only: str | Sequence[str] | None = None,
    comm: Communicator | None = None,
) -> Collected:
    """The state that `save` writes, with the same arguments. Collective."""
    comm, stages = ranks_of_model(model) or comm, stages_of(model.parameters())
    ranks, doing = ranks_of(comm), "mpitrain.save"
    everything: dict[str, Any] = {}
    with ranks.together(doing):
        described, own = user_meta.checked(meta), dict[str, Any](tensors or {})
        names = names_of(model, optimizer)
        if ema is not None:
            ema.check_apart()
    optimizer = agreed_optimizer(optimizer, ema, only, ranks, stages, doing)
    chosen = choose(model, only, ranks, stages, doing)
    if chosen is not None:
        described[SAVED_ONLY] = list(chosen.patterns)
    kinds = _kinds(model, optimizer, names, ema, comm, stages, chosen)
    for kind in kinds:
        described |= kind.meta()
    with ranks.together(doing):
        for kind in kinds:
            everything |= kind.tensors() if chosen is None else chosen.of(kind.tensors())
    holders = holders_of(model, comm if stages is None else None)
    everything, of_first = as_on_first_holder(model, everything, holders)
    of_model = {path.removeprefix("model/"): value for path, value in of_first.items() if path.startswith("model/")}
    warn_of_differences(of_model, comm, doing, stacklevel=4)
    everything = own | everything
    if stages is not None and comm is not None and stages.size > 1:
        everything = with_other_stages(everything, stages, comm, of_first=of_first)
    elif comm is not None and comm.size > 1:
        is_first = is_first_holder(model, comm)
        everything |= {name: of_one_rank(value, is_mine=is_first) for name, value in of_first.items()}
    with ranks.together(doing):
        return Collected(_on_host(everything), described, comm)


def load(
    path: str | os.PathLike[str] | StoredState,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    ema: EMA | None = None,
    tensors: Mapping[str, Any] | None = None,
    hyperparameters: bool = True,
    comm: Communicator | None = None,
    copies: Sequence[str | os.PathLike[str]] | None = None,
    strict: bool = True,
    only: str | Sequence[str] | None = None,
    cast: bool = False,
    verify: bool = True,
) -> dict[str, Any]:
    """Fill a model, sharded or not, and its optimizer from a checkpoint of any number of ranks. Collective.

    Returns the meta of the save, with the same values.

    Model and optimizer are then as those that were saved: state of the optimizer that the checkpoint does not have is removed.

    `path`: the checkpoint, or another StoredState, which has no `copies`.
    `ema`: an `EMA` to fill. `tensors`: further tensors to fill, in the form of `ckpt.load`. `hyperparameters`: also load the settings
    of the optimizer's groups (such as lr); the optimizer must be of the same kind, with the same parameters in each group, in any
    order. `comm`: see `save`. It must have all tensors of the model, of `ema`, of `tensors` and, if one is given, of the optimizer;
    other tensors in it are ignored. `strict=False`: parameters that it lacks, such as a new head, keep their values, their state in the
    optimizer, and the settings of their group if no other parameter of the group is there. `cast`, `verify`, `copies`: see `ckpt.load`.

    `only`: patterns as of `save`. Only what they choose is loaded; all else keeps its values, its state in the optimizer, and the
    settings of its groups. A checkpoint that was saved with `only` is loaded with the patterns of its save, with a RuntimeWarning on
    rank 0 that the rest of the model keeps its values; with `only` or `strict=False` there is no warning.

    The state of `compress_gradients` and of `DiLoCo` belongs to the model: with local steps each copy of the model gets its own. From a
    checkpoint without such a state both begin with step 0, and all copies are the same.
    Raises ckpt.CheckpointError on all ranks if the checkpoint is missing, damaged or of another model, ValueError for a pattern that
    matches nothing.
    """
    source = path if isinstance(path, StoredState) else OnDisk(path, copies)
    comm, stages = ranks_of_model(model) or comm, stages_of(model.parameters())
    ranks, doing = ranks_of(comm), "mpitrain.load"

    def read(wanted: Mapping[str, Any], **more: Any) -> None:
        source.load(wanted, comm=comm, verify=verify, **more)

    with ranks.together(doing):  # first, because these errors need no checkpoint
        names = names_of(model, optimizer)
        if ema is not None:
            ema.check_apart()
    optimizer = agreed_optimizer(optimizer, ema, only, ranks, stages, doing)
    if isinstance(source, OnDisk):
        source.wait(comm)
    parts = [] if diloco_of(model) is None else ["diloco"]
    parts += [] if compression_of(model) is None else ["compression"]
    there = on_rank0(ranks, lambda: look(str(source), source.entries(), parts), doing)
    chosen = choose(model, only, ranks, stages, doing, there, is_expected=not strict)
    kinds = _kinds(
        model, optimizer, names, ema, comm, stages, chosen, hyperparameters=hyperparameters, strict=strict, read=read
    )
    if (diloco := diloco_of(model)) is not None:  # first: in local steps the model's tensors are the outer parameters
        diloco.load_state_dict(there.part("diloco") or {}, None if chosen is None else chosen.names)
    wanted = dict(tensors or {})
    with ranks.together(doing):
        _check_room(wanted)
        for kind in kinds:
            wanted |= kind.room(there) if chosen is None else chosen.of(kind.room(there))
    wanted = _with_names_of_all_stages(wanted, stages)
    whole = ["model/*"]  # all tensors of these names must find room
    if optimizer is not None and any(name.startswith("optimizer/") for name in there.tensors):
        whole.append("optimizer/*")
    if chosen is not None:
        whole = list(dict.fromkeys((*chosen.paths(named(there.tensors, whole)), *wanted)))
    read_only = whole + [name for name in wanted if not name.startswith(("model/", "optimizer/"))]
    arrays = _on_host(wanted)
    if not strict:
        arrays = {name: array for name, array in arrays.items() if name in there.tensors}
        read_only = [pattern for pattern in read_only if pattern not in wanted or pattern in there.tensors]
    read(arrays, only=read_only, strict=strict, cast=cast)
    _write_back(model, {name: wanted[name] for name in arrays}, arrays)
    with ranks.together(doing):  # the meta of a stranger may hold anything
        for kind in kinds:
            if not isinstance(kind, SavedCompression | SavedCopies):
                kind.loaded(there)
        device = next((param.device for param in model.parameters()), torch.device("cpu"))
        meta_of_program = user_meta.restored(there.meta, device)
    for kind in kinds:  # which exchange messages
        if isinstance(kind, SavedCompression | SavedCopies):
            kind.loaded(there)
    return meta_of_program


def _kinds(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    names: Mapping[nn.Parameter, str],
    ema: EMA | None,
    comm: Communicator | None,
    stages: Communicator | None,
    chosen: Chosen | None,
    *,
    hyperparameters: bool = True,
    strict: bool = True,
    read: Read | None = None,
) -> list[Saved]:
    """The kinds of state here. `names`: of the optimizer's parameters. `chosen`: None for all. `read`: for a load.

    Collective if the model is a pipeline, or has compression and is cut by tensor parallelism.
    """
    if chosen is not None:  # the parameters that are not chosen keep their state in the optimizer
        names, strict = {param: name for param, name in names.items() if name in chosen.names}, False
    of_part = None if chosen is None else chosen.names
    kinds: list[Saved] = [SavedModel(model, ema, of_part), SavedExtraState(model, comm, of_part)]
    copies = None
    if (diloco := diloco_of(model)) is not None:
        kinds.append(copies := SavedCopies(model, diloco, optimizer, names, of_part))
    if optimizer is not None:
        options = {"hyperparameters": hyperparameters, "strict": strict}
        kinds.append(SavedOptimizer(model, optimizer, names, copies=copies, comm=comm, stages=stages, **options))
    if (compression := compression_of(model)) is not None:
        kinds.append(SavedCompression(compression, stages, read, of_part))
    return kinds


def _with_names_of_all_stages(wanted: Mapping[str, Any], stages: Communicator | None) -> dict[str, Any]:
    """Every rank asks for the tensors of all stages, so that each finds what the checkpoint lacks, and fills its own. Collective."""
    if stages is None or stages.size == 1:
        return dict(wanted)
    return dict.fromkeys(chain(*stages.all_gather_object(list(wanted))), ()) | dict(wanted)


@torch.no_grad()
def _write_back(model: nn.Module, wanted: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """Copy the loaded arrays to those tensors of `wanted` that are not in host memory."""
    for name, value in wanted.items():
        for target, filled in zip(_data(value), _data(arrays[name]), strict=True):
            if not isinstance(target, torch.Tensor):
                continue
            if name.startswith("model/") and lacks_memory(target):
                target = with_memory(model, name.removeprefix("model/"))
            if target.data_ptr() != filled.data_ptr():
                target.copy_(filled)
            else:  # the load wrote to `target` itself, unseen by autograd
                torch.autograd.graph.increment_version(target)


def _check_room(tensors: Mapping[str, Any]) -> None:
    """ValueError for a tensor of the caller that cannot be filled."""
    for name, value in tensors.items():
        if any(isinstance(data, torch.Tensor) and lacks_memory(data) for data in _data(value)):
            raise ValueError(f"tensor {name!r} is expanded or on the meta device; expected memory for each element")


def _data(value: Any) -> list[Any]:
    """The arrays of a value: those of its Shards, or the value itself."""
    values = value if isinstance(value, list | tuple) else [value]
    return [at.data if isinstance(at, ckpt.Shard) else at for at in values]


def _on_host(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors, with plain values and in host memory for `ckpt`. Tensors that already are so are not copied."""

    def moved(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [moved(shard) for shard in value]
        if isinstance(value, ckpt.Shard):
            return ckpt.Shard(moved(value.data), value.shape, value.offset, value.axes)
        if isinstance(value, torch.Tensor) and value.is_meta:  # a buffer that is about to be loaded
            return torch.zeros(value.shape, dtype=value.dtype)
        return plain(value.cpu()) if isinstance(value, torch.Tensor) else value

    return {name: moved(value) for name, value in tensors.items()}
