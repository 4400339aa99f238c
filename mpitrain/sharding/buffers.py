"""Buffers, such as BatchNorm's statistics. Each rank has its own values until a call of `sync_buffers`.

A model with slices has the same values on all ranks after each step: see slices/buffers.py.
"""

from typing import Literal

import torch
from torch import nn

from ckpt.views import plain, shares_elements
from mpitrain.sharding.unit.unit import sharded_over, slices_of, units_of


def with_memory(model: nn.Module, name: str) -> torch.Tensor:
    """A buffer of a model, by its name, that can be written to.

    If the buffer is on the meta device, an empty one on the model's device takes its place: `fully_shard` gives memory to parameters
    only. If its elements share memory, as those of an expanded tensor do, a copy takes its place.
    """
    buffer = model.get_buffer(name)
    if not lacks_memory(buffer):
        return buffer
    if buffer.is_meta:
        flats = [flat for unit in units_of(model) for flat in unit.flats]
        made = torch.empty(buffer.shape, dtype=buffer.dtype, device=flats[0].device if flats else "cpu")
    else:
        made = buffer.detach().clone(memory_format=torch.contiguous_format)
    _replace(model, buffer, made)
    return made


def lacks_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory, or elements that share it, so that it cannot be filled."""
    return tensor.is_meta or (tensor.layout == torch.strided and shares_elements(tensor.shape, tensor.stride()))


def _replace(model: nn.Module, buffer: torch.Tensor, new: torch.Tensor) -> None:
    """Put `new` in all places of the model that have `buffer`."""
    for module in model.modules():
        for name, held in module._buffers.items():
            if held is buffer:
                module._buffers[name] = new


@torch.no_grad()
def sync_buffers(model: nn.Module, how: Literal["average", "broadcast"] = "average") -> None:
    """Make a sharded model's buffers the same on all ranks. Collective; before an evaluation or a save.

    "average": a floating-point or complex buffer becomes its mean over the ranks, any other buffer (BatchNorm's counts) becomes that of
    rank 0.
    "broadcast": every buffer becomes that of rank 0. The first forward does this, as torch's DistributedDataParallel does. Without
    further calls each rank keeps its own values.
    """
    if how not in ("average", "broadcast"):
        raise ValueError(f"sync_buffers: {how!r}; expected 'average' or 'broadcast'")
    over = sharded_over(model)
    if over is None:
        return
    for name, buffer in list(model.named_buffers(remove_duplicate=how == "average")):
        if buffer.is_meta:
            continue
        values = plain(buffer.detach())
        parts = torch.view_as_real(values) if values.is_complex() else values
        try:
            if how == "average" and parts.is_floating_point():
                # In float64 the mean of equal values is this value for any number of ranks.
                mean = parts.double() if slices_of(model) is not None else parts
                over.data_parallel.all_reduce(mean, "avg")
                parts.copy_(mean)
            else:
                over.data_parallel.broadcast(parts)
        except TypeError as error:
            raise TypeError(f"buffer {name}: {error}") from error
        if values.data_ptr() != buffer.data_ptr():
            _replace(model, buffer, values)  # an expanded or conjugated buffer cannot be written to
