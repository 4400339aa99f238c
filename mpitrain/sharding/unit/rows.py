"""Protection against files that have this rank's rows in place of a whole parameter.

A shard cannot be pickled, and `ckpt.save` calls its `refuse_as_whole`. In the state dict of a model or an optimizer, tensors with the
shape of a shard are `PartTensor`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from mpitrain.placement.part_tensor import IN_UNSHARD, PartTensor, refuse, refuse_whole
from mpitrain.placement.parts import part_of
from mpitrain.sharding.unit.parameter import ShardedParameter
from mpitrain.sharding.unit.registry import all_sharded, find
from mpitrain.sharding.unit.unit import Unit


def guard_shards(unit: Unit) -> None:
    """Let shards, but not copies of them, raise an error when they are pickled. A subclass would be visible to optimizers and hooks.

    The modules that use them refuse whole tensors in a state dict, with advice.
    """
    if unit.ranks.shard.size == 1:
        return
    for user in {id(module): module for param in unit.params for module, _ in param.users}.values():
        user.register_load_state_dict_pre_hook(_refuse_whole_tensors)
    for shard in (param.shard for param in unit.params):
        shard.__reduce_ex__ = shard.refuse_as_whole = partial(_refuse_shard, id(shard))  # type: ignore


def _refuse_shard(key: int, protocol: Any = None) -> NoReturn:
    param = find(key)
    assert param is not None
    refuse(param.name, param.box.shape, param.box.full_shape, _remedy_for(param))


def _refuse_whole_tensors(module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
    """RuntimeError in place of a line of torch's for each tensor of another shape."""
    for key, shown in module._parameters.items():
        given = getattr(state_dict.get(prefix + key), "shape", None)
        if shown is None or given is None or given == shown.shape or (param := find(id(shown))) is None:
            continue
        part = part_of(shown)
        if given in (param.full.shape, None if part is None else part.full_shape):
            refuse_whole(prefix + key, shown.shape, given)


def _remedy_for(param: ShardedParameter) -> str:
    """Within `unshard` a parameter that only `fully_shard` has divided is whole."""
    part = part_of(param.shard)
    return IN_UNSHARD if part is None or not (part.is_cut or part.is_in_stages) else ""


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
    return PartTensor.of(value, param.name, param.box.full_shape, _remedy_for(param)) if has_rows else value
