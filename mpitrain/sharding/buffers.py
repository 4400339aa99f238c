"""Buffers, such as BatchNorm's statistics: on every rank, and each rank's own between the calls of this."""

from typing import Literal

import torch
from torch import nn

from mpitrain.sharding.module import sharded_over, units_of


def with_memory(model: nn.Module, name: str) -> torch.Tensor:
    """A buffer of a model, by its name, that is about to get values: in the place of one on the meta device an empty one where the
    model is. `fully_shard` gives parameters memory, not buffers."""
    path, _, last = name.rpartition(".")
    owner = model.get_submodule(path)
    buffer = owner._buffers[last]
    assert buffer is not None
    if buffer.is_meta:
        flats = [flat for unit in units_of(model) for flat in unit.flats]
        device = flats[0].device if flats else torch.device("cpu")
        buffer = owner._buffers[last] = torch.empty_like(buffer, device=device)
    return buffer


@torch.no_grad()
def sync_buffers(model: nn.Module, how: Literal["average", "broadcast"] = "average") -> None:
    """Make a sharded model's buffers the same on all ranks. Collective; before an evaluation or a save.

    "average": floating ones become their mean over the ranks, others (BatchNorm's counts) rank 0's. "broadcast": all become rank 0's.
    They begin as rank 0's at the first forward; whoever never calls this keeps them local.
    """
    if how not in ("average", "broadcast"):
        raise ValueError(f"sync_buffers: {how!r}; expected 'average' or 'broadcast'")
    over = sharded_over(model)
    if over is None:
        return
    for buffer in model.buffers():
        values = buffer.detach().resolve_conj().contiguous()
        parts = torch.view_as_real(values) if values.is_complex() else values
        if how == "average" and parts.is_floating_point():
            over.all.all_reduce(parts, "avg")
        else:
            over.all.broadcast(parts)
        if values.data_ptr() != buffer.data_ptr():
            buffer.copy_(values)
