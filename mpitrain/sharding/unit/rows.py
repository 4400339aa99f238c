"""State dicts of a model or an optimizer: tensors with the shape of a shard are `PartTensor`, of which no file can be made.

So no file has this rank's rows in place of a whole parameter: see also `guard_shards`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mpitrain.placement.part_tensor import PartTensor
from mpitrain.sharding.unit.parameter import ShardedParameter, remedy_for
from mpitrain.sharding.unit.unit import Unit, all_sharded


def mark_model(module: nn.Module, unit: Unit, state_dict: dict[str, Any], prefix: str) -> None:
    """Make the shards of one sharded module `PartTensor` in a state dict, where its names begin with `prefix`."""
    if unit.ranks.shard.size == 1:
        return
    own = {id(param.shard): param for param in unit.params}
    for name, shown in module.named_parameters(prefix.removesuffix("."), remove_duplicate=False):
        param = own.get(id(shown))
        if param is not None and name in state_dict:
            state_dict[name] = _marked(state_dict[name], param)


def state_dict_of(original: Callable[..., dict[str, Any]], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's state dict, in which the tensors for shards are `PartTensor`."""
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
    """Load a state dict into an optimizer, and turn `PartTensor`, which the optimizer would keep, into plain tensors."""
    original(optimizer, *args, **kwargs)
    for kept in optimizer.state.values():
        if isinstance(kept, dict):  # some optimizers keep other values for all parameters, such as a number of steps
            for what, value in kept.items():
                if isinstance(value, PartTensor):
                    kept[what] = value.as_subclass(torch.Tensor)


def _marked(value: Any, param: ShardedParameter) -> Any:
    """`value` as `PartTensor` if it is a plain tensor with the shape of the parameter's shard; any other value as it is."""
    has_rows = type(value) is torch.Tensor and value.shape == param.shard.shape
    return PartTensor.of(value, param.name, param.box.full_shape, remedy_for(param)) if has_rows else value
