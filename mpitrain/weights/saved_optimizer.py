"""An optimizer's state and settings in a checkpoint.

A tensor with the shape of the shard is this rank's box of a tensor with the parameter's full shape; all others (Adam's step) are the
same on all ranks.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import ckpt
from collectives import Communicator
from mpitrain.weights.by_copy import SavedCopies
from mpitrain.weights.held import Held
from mpitrain.weights.saved import StoredTensor, There


class SavedOptimizer:
    """The state of `optimizer`. `names`: of its parameters. `copies`: of local steps, in which each copy has its own; or None.

    `stages`: the ranks of the pipeline, or None. `hyperparameters`: whether a load also takes the settings, such as lr.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        names: Mapping[nn.Parameter, str],
        *,
        copies: SavedCopies | None,
        stages: Communicator | None,
        hyperparameters: bool = True,
    ) -> None:
        self._model, self._optimizer, self._names, self._copies = model, optimizer, names, copies
        self._stages, self._takes_settings = stages, hyperparameters
        self._loaded: dict[nn.Parameter, dict[str, torch.Tensor]] = {}

    def tensors(self) -> dict[str, Any]:
        held = Held(self._model, is_saved=True)
        return {
            f"optimizer/{key}/{name}": held(value, param)
            for param, name in self._names.items()
            for key, value in self._optimizer.state.get(param, {}).items()
            if isinstance(value, torch.Tensor)
        }

    def meta(self) -> dict[str, Any]:
        """Collective if the model is a pipeline: numbers in the state of a parameter are known to its stage alone."""
        numbers: dict[str, dict[str, Any]] = {}
        for param, name in self._names.items():
            its = self._optimizer.state.get(param, {})
            if its and (plain := {key: value for key, value in its.items() if not isinstance(value, torch.Tensor)}):
                numbers[name] = plain
        if self._stages is not None and self._stages.size > 1:
            numbers = {name: its for theirs in self._stages.all_gather_object(numbers) for name, its in theirs.items()}
        kind, groups = type(self._optimizer).__name__, _hyperparameters(self._optimizer)
        return {"optimizer": {"kind": kind, "groups": groups, "state": numbers}}

    def _check(self, there: There) -> None:
        """CheckpointError if the checkpoint has no optimizer or, if settings are loaded, one of another class or with other groups."""
        path, saved = there.path, there.meta.get("optimizer")
        if saved is None:
            raise ckpt.CheckpointError(f"{path} was saved without an optimizer; load it without one")
        saved_kind, kind = saved.get("kind"), type(self._optimizer).__name__  # older checkpoints do not name it
        num_saved, num_groups = len(saved["groups"]), len(self._optimizer.param_groups)
        if self._takes_settings and saved_kind not in (None, kind):
            raise ckpt.CheckpointError(
                f"{path}: the optimizer is {saved_kind} there, {kind} here; make the same, load without one, "
                "or pass hyperparameters=False to load only the state"
            )
        if self._takes_settings and num_saved != num_groups:
            raise ckpt.CheckpointError(
                f"{path}: the optimizer has {num_saved} parameter groups there, {num_groups} here; "
                "make the same groups, or pass hyperparameters=False to keep the settings of those here"
            )

    def room(self, there: There) -> dict[str, Any]:
        self._check(there)
        held, stored = Held(self._model, is_saved=False), _stored(there)
        found: dict[str, Any] = {}
        self._loaded = {}
        for param, name in self._names.items():
            for key, tensor, has_rows in stored.get(name, ()):
                shape = param.shape if has_rows else tensor.shape
                value = torch.zeros(shape, dtype=getattr(torch, tensor.dtype))
                self._loaded.setdefault(param, {})[key] = value
                found[f"optimizer/{key}/{name}"] = held(value, param)
                if self._copies is not None:
                    found |= self._copies.room_of_state(f"{key}/{name}", value, param, there)
        return found

    def loaded(self, there: There) -> None:
        saved = there.meta["optimizer"]
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                numbers = saved["state"].get(self._names[param], {})
                if param in self._loaded or numbers:
                    # Adam's step stays on the host unless the whole step runs on the device.
                    all_there = group.get("fused") or group.get("capturable")
                    tensors_of = self._loaded.get(param, {}).items()
                    moved = {k: v.to(param.device) if v.ndim or all_there else v for k, v in tensors_of}
                    self._optimizer.state[param] = {**moved, **numbers}
        if self._takes_settings:
            for group, values in zip(self._optimizer.param_groups, saved["groups"], strict=True):
                # JSON has no tuples.
                group.update({key: tuple(v) if isinstance(v, list) else v for key, v in values.items()})


def names_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, str]:
    """The names, in the model, of the optimizer's parameters. ValueError for one that the model does not have."""
    names = {id(param): name for name, param in model.named_parameters()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        if id(param) not in names:
            raise ValueError(
                f"the optimizer has a parameter of shape {tuple(param.shape)} that the model does not have; "
                "make the optimizer after fully_shard, from model.parameters()"
            )
    return {param: names[id(param)] for param in params}


def _stored(there: There) -> dict[str, list[tuple[str, StoredTensor, bool]]]:
    """By parameter the keys of its state in a checkpoint, and whether the tensor has an element for each of the parameter's."""
    entries = []
    for path, tensor in there.tensors.items():
        if path.startswith("optimizer/"):
            _, key, name = path.split("/", 2)
            param = there.tensors.get(f"model/{name}")
            entries.append((name, key, tensor, None if param is None else param.shape))
    # For a scalar parameter, Adam's step and its means have the same shape; for other parameters the shapes differ.
    numbers = {"step"} | {key for _, key, tensor, of_param in entries if not tensor.shape and of_param}
    found: dict[str, list[tuple[str, StoredTensor, bool]]] = {}
    for name, key, tensor, of_param in entries:
        has_rows = tensor.shape == of_param and (bool(tensor.shape) or key not in numbers)
        found.setdefault(name, []).append((key, tensor, has_rows))
    return found


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
