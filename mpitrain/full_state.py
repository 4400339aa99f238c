"""A sharded model's unsharded state dict: one rank's dict of whole tensors, as a plain model has it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mpitrain.sharding import sharded_over
from mpitrain.sharding.buffers import with_memory
from mpitrain.sharding.module import owners_of
from mpitrain.sharding.unit.layout import Box, rows_of
from mpitrain.sharding.unit.marks import box_of
from mpitrain.weights.files import some
from mpitrain.weights.targets import begin


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The unsharded state dict of a sharded model, on the host, on rank 0; an empty dict on the others. Collective.

    One tensor after the other: a rank other than 0 needs memory for the largest parameter only.
    """
    over = sharded_over(model)
    if over is None:
        return {name: value.detach().cpu() for name, value in model.state_dict().items()}
    full: dict[str, torch.Tensor] = {}
    shards = dict(model.named_parameters(remove_duplicate=False))
    owners = owners_of(model)
    for name, value in model.state_dict().items():
        owner = owners.get(shards[name]) if name in shards else None
        whole = value.detach().cpu().contiguous()
        if owner is not None:
            comm = owner.ranks.shard
            boxes = comm.all_gather_object(owner.box)
            whole = torch.empty(sum(b.numel for b in boxes), dtype=value.dtype)
            comm.all_gather(whole, value.detach().cpu().contiguous().view(-1), counts=[b.numel for b in boxes])
            whole = whole.view(owner.full_shape)
        if over.all.rank == 0:
            full[name] = whole
    return full


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state_dict: Mapping[str, Any], *, strict: bool = True) -> None:
    """Fill a model, sharded or not, from an unsharded state dict on rank 0; what the other ranks pass is not looked at. Collective.

    One tensor after the other is broadcast: a rank other than 0 needs memory for the largest one only. Values are cast to the dtypes
    of the model. `strict`: names that only one of both has are an error.
    Raises ValueError on all ranks, before anything is changed, for such names and for other shapes, RuntimeError in the middle of a
    step.
    """
    over = begin(model, "load_full_state_dict")
    if over is None:
        model.load_state_dict(state_dict, strict=strict)
        return
    comm = over.all
    shapes = {id(shard): owner.full_shape for shard, owner in owners_of(model).items()}
    params = dict(model.named_parameters(remove_duplicate=False))
    targets = {  # without what is no tensor: a module's extra state
        name: params.get(name, value)
        for name, value in model.state_dict(keep_vars=True).items()
        if torch.is_tensor(value)
    }
    found: dict[str, torch.dtype] = {}
    with comm.together("load_full_state_dict"):
        if comm.rank == 0:
            _check(targets, shapes, state_dict, strict)
            found = {name: state_dict[name].dtype for name in targets if name in state_dict}
    found = comm.broadcast_object(found)
    for name, dtype in found.items():
        target = targets[name]
        if target.is_meta and name not in params:
            target = with_memory(model, name)
        box: Box | None = box_of(target)
        shape = shapes.get(id(target), tuple(target.shape))
        whole = torch.empty(shape, dtype=dtype)
        if comm.rank == 0:
            whole.copy_(state_dict[name])
        comm.broadcast(whole)
        target.detach().copy_(whole if box is None else rows_of(whole, box))


def _check(
    targets: Mapping[str, torch.Tensor], shapes: Mapping[int, tuple[int, ...]], given: Mapping[str, Any], strict: bool
) -> None:
    missing, unknown = [
        [name for name in one if name not in other] for one, other in ((targets, given), (given, targets))
    ]
    if strict and (missing or unknown):
        raise ValueError(
            f"the state dict lacks {some(missing)} and has {some(unknown)} that the model does not have; "
            "strict=False takes what fits"
        )
    for name, target in targets.items():
        expected = shapes.get(id(target), tuple(target.shape))
        if name in given and tuple(given[name].shape) != expected:
            raise ValueError(f"{name} has shape {tuple(given[name].shape)} in the state dict; expected {expected}")
