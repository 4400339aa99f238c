"""Buffers, such as BatchNorm's statistics. Each rank has its own values until a call of `sync_buffers`.

A model with slices has the same values on all ranks after each step: see slices/buffers.py.
"""

from typing import Literal

import torch
from torch import nn

from mpitrain.sharding.unit.registry import sharded_over, slices_of, units_of


def with_memory(model: nn.Module, name: str) -> torch.Tensor:
    """A buffer of a model, by its name. If the buffer is on the meta device, an empty one on the model's device takes its place.

    `fully_shard` gives memory to parameters only.
    """
    buffer = model.get_buffer(name)
    if buffer.is_meta:
        flats = [flat for unit in units_of(model) for flat in unit.flats]
        buffer = torch.empty_like(buffer, device=flats[0].device if flats else "cpu")
        _replace(model, name, buffer)
    return buffer


def _replace(model: nn.Module, name: str, buffer: torch.Tensor) -> None:
    path, _, last = name.rpartition(".")
    model.get_submodule(path)._buffers[last] = buffer


@torch.no_grad()
def sync_buffers(model: nn.Module, how: Literal["average", "broadcast"] = "average") -> None:
    """Make a sharded model's buffers the same on all ranks. Collective; before an evaluation or a save.

    "average": a floating-point buffer becomes its mean over the ranks, any other buffer (BatchNorm's counts) becomes that of rank 0.
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
        values = buffer.detach().resolve_conj().contiguous()
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
            _replace(model, name, values)  # an expanded or conjugated buffer cannot be written to
