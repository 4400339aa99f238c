"""An optimizer's state and settings in a checkpoint.

A tensor with the shape of the shard is this rank's box of a tensor with the parameter's full shape; all others (Adam's step) are the
same on all ranks.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

import ckpt
from ckpt.convert.formats.safetensors import some
from ckpt.ranks import ranks_of
from ckpt.storage.local import in_a_line
from collectives import Communicator
from mpitrain.sharding.unit.unit import params_by_shard
from mpitrain.weights.held import HeldTensors
from mpitrain.weights.kinds.by_copy import SavedCopies
from mpitrain.weights.kinds.groups import SavedGroups
from mpitrain.weights.kinds.kind import StoredTensor, There
from mpitrain.weights.meta.plain_values import check_dense, decoded, encoded, small_tensor, torch_dtype

_NUMBERS = {"step", "mu_product", "eta", "mu", "t", "H_diag"}
"""The tensors in the state of torch's optimizers that are one number for a whole parameter. So are those in lists, such as ro[0]."""


class SavedOptimizer:
    """The state of `optimizer`. `names`: of its parameters. `copies`: of local steps, in which each copy has its own; or None.

    `comm`: the ranks of the model, or None. `stages`: the ranks of the pipeline, or None. `hyperparameters`: whether a load also takes
    the settings, such as lr. `strict`: a load is for exactly the parameters of the checkpoint; else those that the checkpoint does not
    have keep their state.

    After a load the optimizer is as the one that was saved: state that was not there is gone.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        names: Mapping[nn.Parameter, str],
        *,
        copies: SavedCopies | None,
        comm: Communicator | None,
        stages: Communicator | None,
        hyperparameters: bool = True,
        strict: bool = True,
    ) -> None:
        self._model, self._optimizer, self._names, self._copies = model, optimizer, names, copies
        self._ranks, self._stages = ranks_of(comm), stages if stages is not None and stages.size > 1 else None
        self._takes_settings, self._strict = hyperparameters, strict
        self._groups = SavedGroups(optimizer, names, stages, strict=strict)
        self._loaded: dict[nn.Parameter, dict[str, torch.Tensor]] = {}

    def tensors(self) -> dict[str, Any]:
        held = HeldTensors(self._model, is_saved=True)
        return {
            f"optimizer/{key}/{name}": held(value, param)
            for param, name in self._names.items()
            for key, value in self._tensors_of(param).items()
        }

    def meta(self) -> dict[str, Any]:
        """Collective: TypeError on all ranks if one has a value that a checkpoint cannot keep.

        Numbers in the state of a parameter are known to its stage of a pipeline alone.
        """
        with self._ranks.together("mpitrain.save"):
            settings = self._groups.settings()
            numbers = {name: its for param, name in self._names.items() if (its := self._numbers_of(param, name))}
            others = [
                [encoded(key, "a key of the optimizer's state"), encoded(value, f"{key!r} of the optimizer's state")]
                for key, value in self._optimizer.state.items()
                if not isinstance(key, torch.Tensor)
            ]
            _check_whole(self._optimizer)
        found = {"kind": type(self._optimizer).__name__, **self._groups.meta(settings)}
        of_stages = [(numbers, self._cut_of_scalars(), others)]
        if self._stages is not None:
            of_stages = self._stages.all_gather_object(of_stages[0])
        found["state"] = {name: its for theirs, *_ in of_stages for name, its in theirs.items()}
        found["cut"] = {name: keys for _, theirs, _ in of_stages for name, keys in theirs.items()}
        if first := next((theirs for *_, theirs in of_stages if theirs), None):
            found["others"] = first
        return {"optimizer": found}

    def _cut_of_scalars(self) -> dict[str, list[str]]:
        """The keys of the state of each scalar parameter that is cut as the parameter is; the shapes in a checkpoint do not show it.

        Parameters that are not sharded are left out: here, too, a number for the whole parameter has the shape of its state.
        """
        sharded, found = params_by_shard(self._model), dict[str, list[str]]()
        for param, name in self._names.items():
            if param in sharded and not sharded[param].full.shape:
                found[name] = [key for key, value in self._tensors_of(param).items() if value.shape == param.shape]
        return found

    def _tensors_of(self, param: nn.Parameter) -> dict[str, torch.Tensor]:
        """The tensors in the state of a parameter by key. Those in a list or a dict have the keys KEY[0], KEY[1], ..."""
        found: dict[str, torch.Tensor] = {}
        for key, value in self._optimizer.state.get(param, {}).items():
            if isinstance(value, torch.Tensor):
                found[key] = value
            elif isinstance(value, list | tuple | dict):
                encoded(value, f"{key!r} of the optimizer's state of {self._names[param]}", _Numbered(key, found))
        return found

    def _numbers_of(self, param: nn.Parameter, name: str) -> dict[str, Any]:
        """What the state of a parameter has beside tensors, as JSON."""
        found: dict[str, Any] = {}
        for key, value in self._optimizer.state.get(param, {}).items():
            if not isinstance(key, str) or "/" in key:
                raise TypeError(
                    f"the optimizer's state of {name} has the key {key!r}; a checkpoint keeps only text without '/' as keys"
                )
            where = f"{key!r} of the optimizer's state of {name}"
            if isinstance(value, torch.Tensor):
                check_dense(value, where)
            else:
                found[key] = encoded(value, where, _Numbered(key, {}))
        return found

    def _check(self, there: There) -> None:
        """CheckpointError if the checkpoint has no optimizer or, if settings are loaded, one of another class or with other groups."""
        path, saved = there.path, there.part("optimizer")
        if saved is None:
            raise ckpt.CheckpointError(f"{path} was saved without an optimizer; load it without one")
        saved_kind, kind = saved.get("kind"), type(self._optimizer).__name__  # older checkpoints do not name it
        if self._takes_settings and saved_kind not in (None, kind):
            raise ckpt.CheckpointError(
                f"{path}: the optimizer is {saved_kind} there, {kind} here; make the same, load without one, "
                "or pass hyperparameters=False to load only the state"
            )
        if self._takes_settings:
            self._groups.begin(there)

    def room(self, there: There) -> dict[str, Any]:
        self._check(there)
        held, stored = HeldTensors(self._model, is_saved=False), _stored(there)
        found: dict[str, Any] = {}
        self._loaded = {}
        for param, name in self._names.items():
            for key, tensor, has_rows in stored.get(name, ()):
                shape = param.shape if has_rows else tensor.shape
                # In the dtype of the save; but in that of the parameter if it was so there, and `cast` changes it.
                follows = has_rows and tensor.dtype == there.tensors[f"model/{name}"].dtype
                value = _zeros(shape, param.dtype if follows else torch_dtype(tensor.dtype), there, f"{key}/{name}")
                self._loaded.setdefault(param, {})[key] = value
                found[f"optimizer/{key}/{name}"] = held(value, param)
                if self._copies is not None:
                    found |= self._copies.room_of_state(f"{key}/{name}", value, param, there)
        return found

    def loaded(self, there: There) -> None:
        optimizer, saved = self._optimizer, there.meta["optimizer"]
        if self._takes_settings:
            self._groups.take()
        for group in optimizer.param_groups:
            for param in group["params"]:
                name = self._names.get(param)
                if name is None or not (self._strict or f"model/{name}" in there.tensors):
                    continue
                if state := self._state_of(param, group, saved["state"].get(name, {})):
                    optimizer.state[param] = state
                else:
                    optimizer.state.pop(param, None)
        self._take_others(saved)
        if "state" in vars(optimizer):  # a wrapper has it from another optimizer
            # as torch's load_state_dict does: settings that a later version of torch has get their defaults
            try:
                optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
            except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
                raise ckpt.CheckpointError(
                    f"{there.path}: {type(optimizer).__name__} does not take the state there: {type(error).__name__}: "
                    f"{in_a_line(error)}"
                ) from error

    def _state_of(self, param: nn.Parameter, group: Mapping[str, Any], numbers: Mapping[str, Any]) -> dict[str, Any]:
        """The state of a parameter from what `room` has got, on the devices that torch's load_state_dict chooses."""
        # Adam's step stays on the host unless the whole step runs on the device.
        all_there = group.get("fused") or group.get("capturable")
        tensors = {
            key: value if key == "step" and not all_there else value.to(param.device)
            for key, value in self._loaded.pop(param, {}).items()
        }
        its = {key: decoded(value, lambda each: tensors.pop(each["value"])) for key, value in numbers.items()}
        return {**tensors, **its}

    def _take_others(self, saved: Mapping[str, Any]) -> None:
        """Take over what the state has for no parameter."""
        state = self._optimizer.state
        device = next(iter(self._names), torch.empty(0)).device
        if self._strict and "names" in saved:  # older versions did not save it
            for key in [key for key in state if not isinstance(key, torch.Tensor)]:
                del state[key]
        for key, value in saved.get("others", ()):
            state[decoded(key, lambda each: small_tensor(each, device))] = decoded(
                value, lambda each: small_tensor(each, device)
            )


def _zeros(shape: Sequence[int], dtype: torch.dtype, there: There, name: str) -> torch.Tensor:
    """Memory for a tensor of the checkpoint. ckpt.CheckpointError if there is not so much."""
    try:
        return torch.zeros(shape, dtype=dtype)
    except RuntimeError:
        raise ckpt.CheckpointError(
            f"{there.path}: optimizer/{name} of shape {tuple(shape)} does not fit into memory"
        ) from None


class _Numbered:
    """Keeps the tensors of one value of a state beside it, in `found`."""

    def __init__(self, key: str, found: dict[str, torch.Tensor]) -> None:
        self._key, self._found, self._num = key, found, 0

    def __call__(self, tensor: torch.Tensor) -> dict[str, Any]:
        key = f"{self._key}[{self._num}]"
        self._num += 1
        self._found[key] = tensor
        return {"type": "stored", "value": key}


def _check_whole(optimizer: torch.optim.Optimizer) -> None:
    """TypeError if the optimizer has more state than torch's optimizers have."""
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        return
    if more := [str(key) for key in optimizer.state_dict() if key not in ("state", "param_groups")]:
        raise TypeError(
            f"the state_dict() of {type(optimizer).__name__} has {some(more)}, which a checkpoint does not keep; expected 'state' "
            "and 'param_groups': keep these values in one of them, or save the model without the optimizer"
        )


def names_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[nn.Parameter, str]:
    """The names, in the model, of the optimizer's parameters, if there is one.

    ValueError for one that the model does not have, TypeError for several optimizers.
    """
    if optimizer is None:
        return {}
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}; expected one torch.optim.Optimizer, which may have several groups; "
            "with several optimizers write one checkpoint for each, of the part of the model that it trains"
        )
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
        if path.startswith("optimizer/") and path.count("/") > 1:  # `ckpt.load` complains of others
            _, key, name = path.split("/", 2)
            param = there.tensors.get(f"model/{name}")
            entries.append((name, key, tensor, None if param is None else param.shape))
    # For a scalar parameter, Adam's step and its means have the same shape; for other parameters the shapes differ.
    is_cut = {key: tensor.shape == of_param for _, key, tensor, of_param in entries if of_param}
    cut = there.meta["optimizer"].get("cut", {})
    found: dict[str, list[tuple[str, StoredTensor, bool]]] = {}
    for name, key, tensor, of_param in entries:
        has_rows = tensor.shape == of_param
        if has_rows and name in cut:
            has_rows = key in cut[name]
        elif has_rows and not tensor.shape:  # an older checkpoint, or the model was not sharded
            has_rows = is_cut.get(key, key not in _NUMBERS and "[" not in key)
        found.setdefault(name, []).append((key, tensor, has_rows))
    return found
