"""The tensors of a model that hold weights: parameters and persistent buffers, whole or as this rank's rows."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from ckpt.ranks import Ranks, ranks_of
from mpitrain.sharding.module import steps_of
from mpitrain.sharding.step.step import Phase
from mpitrain.sharding.unit.layout import ShardBox
from mpitrain.sharding.unit.ranks import DataParallelRanks
from mpitrain.sharding.unit.registry import sharded_over, units_of


class Target(NamedTuple):
    """A parameter or buffer of a model. Only a sharded parameter has the last three fields."""

    names: list[str]  # several names if the tensor is tied
    tensor: torch.Tensor  # the shard of a sharded parameter
    shape: tuple[int, ...]  # shape of the whole tensor
    box: ShardBox | None = None  # this rank's rows
    boxes: Sequence[ShardBox] = ()  # the rows of each rank of this copy, in order
    ranks: DataParallelRanks | None = None


def targets_of(model: nn.Module) -> list[Target]:
    """All tensors in the order of the model's state dict, each once. Other values (a module's extra state) are left out."""
    sharded = {
        id(param.shard): Target(
            [],
            param.shard,
            tuple(param.full.shape),
            param.box,
            [flat.layout.box(index, rank) for rank in range(param.ranks.shard.size)],
            param.ranks,
        )
        for unit in units_of(model)
        for flat in unit.flats
        for index, param in enumerate(flat.params)
    }
    params = dict(model.named_parameters(remove_duplicate=False))
    found: dict[int, Target] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        tensor = params.get(name, value)
        if torch.is_tensor(tensor):
            whole = sharded.get(id(tensor)) or Target([], tensor, tuple(tensor.shape))
            found.setdefault(id(tensor), whole).names.append(name)
    return list(found.values())


def begin(model: nn.Module, doing: str) -> Ranks:
    """Prepare `doing`, which reads or writes the shards: free the full parameters. Returns the ranks of the model. Collective.

    RuntimeError on all ranks in the middle of a step. A model that is not sharded has one rank.
    """
    over = sharded_over(model)
    comm = ranks_of(None if over is None else over.data_parallel)
    with comm.together(doing):
        for step in steps_of(model):
            step.tidy()
            if step.phase is not Phase.IDLE:
                raise RuntimeError(
                    "the model is in the middle of a step, or within unshard, where its parameters are full"
                )
    for unit in units_of(model):
        unit.reshard()
    return comm
