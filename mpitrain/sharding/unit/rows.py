"""Protection against files that have this rank's rows in place of a whole parameter. The error names the functions that write all rows.

A shard cannot be pickled. In the state dict of a model or an optimizer, tensors with the shape of a shard are `Rows`. `Rows` compute,
copy and load like any tensor. They cannot be pickled, and do not return their storage, which safetensors reads first. A result of
the same shape (`cpu()`, `half()`, `clone()`, a sum) is `Rows`, too. `ckpt.save` calls the method `refuse_as_whole` of shards and
`Rows`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from mpitrain.sharding.unit.layout import ShardBox
from mpitrain.sharding.unit.parameter import ShardedParameter
from mpitrain.sharding.unit.registry import all_sharded, find
from mpitrain.sharding.unit.unit import Unit
from mpitrain.torch_internals import without_overrides


class Rows(torch.Tensor):
    """This rank's rows of a parameter, or of an optimizer's tensor for this parameter, in a state dict.

    `rows.as_subclass(torch.Tensor)` is a plain tensor of the same memory.
    """

    _name: str
    _box: ShardBox

    @staticmethod
    def of(rows: torch.Tensor, name: str, box: ShardBox) -> "Rows":
        """The same memory as `Rows` of the parameter `name`."""
        made = rows.as_subclass(Rows)
        made._name, made._box = name, box
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = (*args, *(kwargs or {}).values())
        with without_overrides():
            result = func(*args, **(kwargs or {}))
            rows = next((value for value in given if isinstance(value, Rows)), None)
            is_new = type(result) is torch.Tensor and not any(result is value for value in given)
            if rows is not None and is_new and result.shape == rows.shape and func is not torch.Tensor.as_subclass:
                return Rows.of(result, rows._name, rows._box)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> "Rows":
        if id(self) not in memo:
            memo[id(self)] = self.detach().clone()
        return memo[id(self)]

    def refuse_as_whole(self, *args: Any) -> NoReturn:
        """Raise TypeError, because a file would lack the rows of the other ranks."""
        _refuse(self._name, self._box)

    __reduce_ex__ = storage = untyped_storage = refuse_as_whole


def _refuse(name: str, box: ShardBox) -> NoReturn:
    raise TypeError(
        f"{name} is sharded: this rank has rows {tuple(box.shape)} of {tuple(box.full_shape)}, and a file of its rows would lack those "
        "of the other ranks; write the whole model by mpitrain.save or mpitrain.export_weights, or take whole parameters from "
        "mpitrain.full_state_dict(model) or within `with mpitrain.unshard(model):`"
    )


def guard_shards(unit: Unit) -> None:
    """Let shards, but not copies of them, raise an error when they are pickled. A subclass would be visible to optimizers and hooks."""
    if unit.ranks.shard.size == 1:
        return
    for shard in (param.shard for param in unit.params):
        shard.__reduce_ex__ = shard.refuse_as_whole = partial(_refuse_shard, id(shard))  # type: ignore


def _refuse_shard(key: int, protocol: Any = None) -> NoReturn:
    param = find(key)
    assert param is not None
    _refuse(param.name, param.box)


def mark_model(module: nn.Module, unit: Unit, state_dict: dict[str, Any], prefix: str) -> None:
    """Make the shards of one sharded module `Rows` in a state dict, where its names begin with `prefix`."""
    if unit.ranks.shard.size == 1:
        return
    own = {id(param.shard): param for param in unit.params}
    for name, shown in module.named_parameters(prefix.removesuffix("."), remove_duplicate=False):
        param = own.get(id(shown))
        if param is not None and name in state_dict:
            state_dict[name] = _marked(state_dict[name], param)


def state_dict_of(original: Callable[..., dict[str, Any]], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's state dict, in which the tensors for shards are `Rows`."""
    found = original(optimizer)
    own = {id(shard) for group in optimizer.param_groups for shard in group["params"]}
    cut = {id(param.shard): param for param in all_sharded() if id(param.shard) in own and param.ranks.shard.size > 1}
    if not cut:
        return found
    state = dict(found["state"])
    for group, saved in zip(optimizer.param_groups, found["param_groups"], strict=True):
        for shard, key in zip(group["params"], saved["params"], strict=True):
            param = cut.get(id(shard))
            if param is not None and key in state:
                state[key] = {what: _marked(value, param) for what, value in state[key].items()}
    return {**found, "state": state}


def load_state_dict(original: Callable[..., None], optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
    """Load a state dict into an optimizer, and turn `Rows`, which the optimizer would keep, into plain tensors."""
    original(optimizer, *args, **kwargs)
    for kept in optimizer.state.values():
        if isinstance(kept, dict):  # some optimizers keep other values for all parameters, such as a number of steps
            for what, value in kept.items():
                if isinstance(value, Rows):
                    kept[what] = value.as_subclass(torch.Tensor)


def _marked(value: Any, param: ShardedParameter) -> Any:
    """`value` as `Rows` if it is a plain tensor with the shape of the parameter's shard; any other value as it is."""
    has_rows = type(value) is torch.Tensor and value.shape == param.shard.shape
    return Rows.of(value, param.name, param.box) if has_rows else value
