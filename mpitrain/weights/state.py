"""Model and optimizer <-> checkpoint: the name of each tensor in the checkpoint, and the box of it that this rank holds.

`model/NAME` are parameters and buffers, `optimizer/KEY/NAME` the optimizer's state KEY of a parameter, `ema/NAME` its average. A
tensor with the shape of the shard is this rank's box of a tensor with the parameter's full shape; all others (Adam's step) are the
same on all ranks.

A scalar parameter has a shard of shape (1,) on one rank and (0,) on the others, since no scalar can be empty. In a checkpoint it is
a scalar as in the plain model, and the box of the one rank is the whole tensor.
"""

import os
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

import ckpt
from ckpt.ranks import ranks_of
from collectives import Communicator
from mpitrain.parts import Part, part_of, stages_of
from mpitrain.rank0 import on_rank0
from mpitrain.sharding import EMA
from mpitrain.sharding.buffers import with_memory
from mpitrain.sharding.unit.parameter import ShardedParameter
from mpitrain.sharding.unit.ranks import SHARD
from mpitrain.sharding.unit.registry import params_by_shard
from mpitrain.weights.stages import with_other_stages
from mpitrain.weights.targets import is_copy_of, ranks_of_model


class Source(Protocol):
    """A stored state: a checkpoint, or copies in node memory."""

    def entries(self) -> ckpt.Checkpoint:
        """The names, shapes and dtypes of its tensors, and its meta. Only rank 0 calls it."""

    def load(self, tensors: Mapping[str, Any], *, comm: Communicator | None, **options: Any) -> dict[str, Any]:
        """Fill `tensors` as `ckpt.load` does; returns the meta. Collective."""


class OnDisk:
    """The Source that is a checkpoint. `copies`: places of copies of it."""

    def __init__(self, path: str | os.PathLike[str], copies: Sequence[str | os.PathLike[str]] | None = None) -> None:
        self._path, self._copies = path, copies

    def __str__(self) -> str:
        return os.fspath(self._path)

    def entries(self) -> ckpt.Checkpoint:
        return ckpt.open(self._path, copies=self._copies)

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
    comm: Communicator | None = None,
    **options: Any,
) -> None:
    """Write a checkpoint of a model, its optimizer and an average of its weights. Collective over the ranks of a sharded model.

    `comm`: for a model that is not sharded, the ranks that all hold this model and make this call; None: only this process saves.
    `meta`: a JSON-like dict of the user. `tensors`: further tensors in the form of `ckpt.save`. The options (`files`, `driver`,
    `background`, `copies`, `keep`, `keep_every`, `overwrite`) and the errors are those of `ckpt.save`.
    """
    state = collect(model, optimizer, meta=meta, ema=ema, tensors=tensors, comm=comm)
    ckpt.save(path, state.tensors, comm=state.comm, meta=state.meta, **options)


def collect(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    meta: Mapping[str, Any] | None = None,
    ema: EMA | None = None,
    tensors: Mapping[str, Any] | None = None,
    comm: Communicator | None = None,
) -> Collected:
    """The state that `save` writes, with the same arguments. Collective if the model is a pipeline."""
    comm, stages = ranks_of_model(model) or comm, stages_of(model.parameters())
    held = _Held(model, is_saved=True)
    everything = {**_model_tensors(model, ema, held), **(tensors or {})}
    described = dict(meta or {})
    numbers: dict[str, dict[str, Any]] = {}
    if optimizer is not None:
        names = _names(model, optimizer)
        for param, name in names.items():
            for key, value in optimizer.state.get(param, {}).items():
                if isinstance(value, torch.Tensor):
                    everything[f"optimizer/{key}/{name}"] = held(value, param)
                else:
                    numbers.setdefault(name, {})[key] = value
    if stages is not None and comm is not None and stages.size > 1:
        everything = with_other_stages(everything, stages, comm)
        numbers = {name: its for theirs in stages.all_gather_object(numbers) for name, its in theirs.items()}
    if optimizer is not None:
        kind = type(optimizer).__name__
        described["optimizer"] = {"kind": kind, "groups": _hyperparameters(optimizer), "state": numbers}
    return Collected(_on_host(everything), described, comm)


def load(
    path: str | os.PathLike[str] | Source,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    ema: EMA | None = None,
    tensors: Mapping[str, Any] | None = None,
    hyperparameters: bool = True,
    comm: Communicator | None = None,
    copies: Sequence[str | os.PathLike[str]] | None = None,
    strict: bool = True,
    cast: bool = False,
    verify: bool = True,
) -> dict[str, Any]:
    """Fill a model, sharded or not, and its optimizer from a checkpoint of any number of ranks; returns its meta. Collective.

    `path`: the checkpoint, or another Source, which has no `copies`.
    `ema`: an `EMA` to fill. `tensors`: further tensors to fill, in the form of `ckpt.load`. `hyperparameters`: also load the
    optimizer's settings (such as lr), which must be of the same kind of optimizer. `comm`: see `save`. The checkpoint must have all
    tensors of the model, `ema`, `tensors` and, if one is given, of the optimizer; other tensors in it are ignored. `strict=False`:
    tensors that the checkpoint lacks, such as a new head, keep their values. `cast`, `verify`, `copies`: see `ckpt.load`.
    Raises ckpt.CheckpointError on all ranks if the checkpoint is missing, damaged or of another model.
    """
    source = OnDisk(path, copies) if isinstance(path, str | os.PathLike) else path
    comm, stages = ranks_of_model(model) or comm, stages_of(model.parameters())
    held = _Held(model, is_saved=False)
    wanted = {**_model_tensors(model, ema, held), **(tensors or {})}
    if stages is not None and stages.size > 1:
        # Every rank asks for the tensors of all stages, so that each finds what the checkpoint lacks, and fills its own.
        wanted = dict.fromkeys(chain(*stages.all_gather_object(list(wanted))), ()) | wanted
    only = ["model/*", *(name for name in wanted if not name.startswith("model/"))]
    state: dict[nn.Parameter, dict[str, torch.Tensor]] = {}
    names = {} if optimizer is None else _names(model, optimizer)
    ranks, doing = ranks_of(comm), "mpitrain.load"
    needs_look = optimizer is not None or not strict
    there = on_rank0(ranks, lambda: _seen(source.entries()), doing) if needs_look else None
    if optimizer is not None and there is not None:
        if there.state:  # plain SGD has no state, and a pattern that matches nothing would be an error
            only.append("optimizer/*")
        with ranks.together(doing):
            _check_optimizer(str(source), there, optimizer, hyperparameters)
        for param, name in names.items():
            for key, shape, dtype, has_rows in there.state.get(name, ()):
                value = torch.zeros(param.shape if has_rows else shape, dtype=getattr(torch, dtype))
                state.setdefault(param, {})[key] = value
                wanted[f"optimizer/{key}/{name}"] = held(value, param)
        if stages is not None and stages.size > 1:
            theirs = chain(*stages.all_gather_object([name for name in wanted if name.startswith("optimizer/")]))
            wanted = dict.fromkeys(theirs, ()) | wanted
    arrays = _on_host(wanted)
    if there is not None and not strict:
        arrays = {name: array for name, array in arrays.items() if name in there.names}
        only = [pattern for pattern in only if pattern not in wanted or pattern in there.names]
    meta = source.load(arrays, comm=comm, only=only, strict=strict, cast=cast, verify=verify)
    with torch.no_grad():
        for name, value in wanted.items():
            if name not in arrays:
                continue
            for target, source in zip(_data(value), _data(arrays[name]), strict=True):
                if not isinstance(target, torch.Tensor):
                    continue
                if target.is_meta:
                    target = with_memory(model, name.removeprefix("model/"))
                if target.data_ptr() != source.data_ptr():
                    target.copy_(source)
                else:  # the load wrote to `target` itself, unseen by autograd
                    torch.autograd.graph.increment_version(target)
    if optimizer is not None:
        _take_over(optimizer, meta["optimizer"], state, names, hyperparameters)
    return meta


def _take_over(
    optimizer: torch.optim.Optimizer,
    saved: Mapping[str, Any],
    state: Mapping[nn.Parameter, Mapping[str, torch.Tensor]],
    names: Mapping[nn.Parameter, str],
    hyperparameters: bool,
) -> None:
    """Give the optimizer its loaded `state`, with the numbers and settings in the checkpoint's meta, `saved`."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            numbers = saved["state"].get(names[param], {})
            if param in state or numbers:
                # Adam's step stays on the host unless the whole step runs on the device.
                all_there = group.get("fused") or group.get("capturable")
                tensors_of = state.get(param, {}).items()
                moved = {k: v.to(param.device) if v.ndim or all_there else v for k, v in tensors_of}
                optimizer.state[param] = {**moved, **numbers}
    if hyperparameters:
        for group, values in zip(optimizer.param_groups, saved["groups"], strict=True):
            # JSON has no tuples.
            group.update({key: tuple(v) if isinstance(v, list) else v for key, v in values.items()})


def _model_tensors(model: nn.Module, ema: EMA | None, held: "_Held") -> dict[str, Any]:
    """Parameters (tied ones under the first of their names), persistent buffers and averages."""
    params = dict(model.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    tensors: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if name in params and first.setdefault(id(params[name]), name) != name:
            continue
        tensors[f"model/{name}"] = held(value, params.get(name))
    for name, value in ({} if ema is None else ema.tensors).items():
        tensors[f"ema/{name}"] = held(value, params[name])
    return tensors


class _Held:
    """Makes boxes for `ckpt` of the tensors that belong to a model's parameters.

    `is_saved`: boxes that another rank saves, because it holds a copy of this shard, are empty.
    """

    def __init__(self, model: nn.Module, *, is_saved: bool) -> None:
        self._model, self._is_saved, self._sharded = model, is_saved, params_by_shard(model)

    def __call__(self, value: torch.Tensor, param: nn.Parameter | None) -> Any:
        """`value`, which belongs to `param`: as a box if it has the shard's shape, else as a tensor that all ranks share."""
        data = value.detach()
        owner, part = (None, None) if param is None else (self._sharded.get(param), part_of(param))
        if (owner is None and part is None) or param is None or value.shape != param.shape:
            return data
        is_left_out = self._is_saved and is_copy_of(self._model, owner, part)
        if owner is not None and not owner.full.shape:
            return ckpt.Shard(data.view(()) if data.numel() and not is_left_out else data[:0], (), ())
        if part is None:
            assert owner is not None
            return ckpt.Shard(
                data[:0] if is_left_out else data, owner.box.full_shape, owner.box.offset, _axes(owner, part)
            )
        if not part.full_shape:
            return data
        offset = (0,) * data.ndim if owner is None else owner.box.offset
        found = [] if is_left_out else part.within(offset, data.shape)
        axes = _axes(owner, part)
        if not found:
            return ckpt.Shard(data.new_empty((0,) * data.ndim), part.full_shape, (0,) * data.ndim, axes)
        return [ckpt.Shard(data[place], part.full_shape, box.offset, axes) for place, box in found]


def _axes(owner: ShardedParameter | None, part: Part | None) -> list[str | None]:
    """The axes of the mesh along which each dimension of a parameter is cut."""
    shape = owner.box.full_shape if owner is not None else part.shape  # type: ignore[union-attr]
    rows = next((dim for dim, n in enumerate(shape) if n > 1), 0)
    axes: list[list[str]] = [[] for _ in shape]
    if part is not None and part.is_cut:
        axes[part.dim].append("tp")
    if owner is not None and owner.ranks.shard.size > 1:
        axes[rows].append(SHARD[0])
    return [",".join(names) or None for names in axes]


def _data(value: Any) -> list[Any]:
    """The arrays of a value: those of its Shards, or the value itself."""
    values = value if isinstance(value, list | tuple) else [value]
    return [at.data if isinstance(at, ckpt.Shard) else at for at in values]


def _on_host(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors, made contiguous and in host memory for `ckpt`. Tensors that already are so are not copied."""

    def moved(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [moved(shard) for shard in value]
        if isinstance(value, ckpt.Shard):
            return ckpt.Shard(moved(value.data), value.shape, value.offset, value.axes)
        if isinstance(value, torch.Tensor) and value.is_meta:  # a buffer that is about to be loaded
            return torch.zeros_like(value, device="cpu")
        return value.cpu().contiguous() if isinstance(value, torch.Tensor) else value

    return {name: moved(value) for name, value in tensors.items()}


Stored = dict[str, list[tuple[str, tuple[int, ...], str, bool]]]
"""For each parameter's name the keys of its optimizer state in a checkpoint, each with its shape, its dtype, and whether it has
one element for each element of the parameter."""


class _There(NamedTuple):
    """The content of a checkpoint: the names of the tensors, and the optimizer's state."""

    names: set[str]
    state: Stored
    optimizer: tuple[str | None, int] | None
    """The optimizer's class, which older checkpoints do not name, and its number of parameter groups; None without an optimizer."""


def _seen(checkpoint: ckpt.Checkpoint) -> _There:
    entries: list[tuple[str, str, tuple[int, ...], str, tuple[int, ...] | None]] = []
    for entry in checkpoint.values():
        kind, _, rest = entry.name.partition("/")
        if kind == "optimizer":
            key, _, name = rest.partition("/")
            param = checkpoint.get(f"model/{name}")
            entries.append((name, key, entry.shape, str(entry.dtype), None if param is None else param.shape))
    # For a scalar parameter, Adam's step and its means have the same shape; for other parameters the shapes differ.
    numbers = {"step"} | {key for _, key, shape, _, of_param in entries if not shape and of_param}
    found: Stored = {}
    for name, key, shape, dtype, of_param in entries:
        has_rows = shape == of_param and (bool(shape) or key not in numbers)
        found.setdefault(name, []).append((key, shape, dtype, has_rows))
    optimizer = checkpoint.meta.get("optimizer")
    saved = None if optimizer is None else (optimizer.get("kind"), len(optimizer["groups"]))
    return _There(set(checkpoint), found, saved)


def _check_optimizer(path: str, there: _There, optimizer: torch.optim.Optimizer, strict: bool) -> None:
    """CheckpointError if the checkpoint has no optimizer or, with `strict`, an optimizer of another class or with other groups."""
    if there.optimizer is None:
        raise ckpt.CheckpointError(f"{path} was saved without an optimizer; load it without one")
    (saved_kind, num_saved), kind, num_groups = there.optimizer, type(optimizer).__name__, len(optimizer.param_groups)
    if strict and saved_kind not in (None, kind):
        raise ckpt.CheckpointError(
            f"{path}: the optimizer is {saved_kind} there, {kind} here; make the same, load without one, "
            "or pass hyperparameters=False to load only the state"
        )
    if strict and num_saved != num_groups:
        raise ckpt.CheckpointError(
            f"{path}: the optimizer has {num_saved} parameter groups there, {num_groups} here; "
            "make the same groups, or pass hyperparameters=False to keep the settings of those here"
        )


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, str]:
    """The names, in the model, of the optimizer's parameters."""
    names = {id(param): name for name, param in model.named_parameters()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        if id(param) not in names:
            raise ValueError(
                f"the optimizer has a parameter of shape {tuple(param.shape)} that the model does not have; "
                "make the optimizer after fully_shard, from model.parameters()"
            )
    return {param: names[id(param)] for param in params}


def _hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    plain = (bool, int, float, str, type(None))
    return [
        {
            key: value
            for key, value in group.items()
            if isinstance(value, plain) or (isinstance(value, tuple) and all(isinstance(v, plain) for v in value))
        }
        for group in optimizer.param_groups
    ]
