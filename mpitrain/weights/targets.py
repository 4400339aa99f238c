"""What of a model has weights: its parameters and persistent buffers, whole or as this rank's rows of them."""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import nn

from mpitrain.sharding import sharded_over
from mpitrain.sharding.module import sharded_modules, units_of
from mpitrain.sharding.step.step import Phase
from mpitrain.sharding.unit.layout import Box
from mpitrain.sharding.unit.marks import box_of
from mpitrain.sharding.unit.ranks import Ranks


class Target(NamedTuple):
    """A parameter or buffer. `names`: all that it has, several where it is tied. `box`: this rank's rows; None: it has all of it.

    `boxes`: of each rank of its copy, in order. `ranks`: those it is sharded over. `owner`: the module whose buffer it is.
    """

    names: list[str]
    tensor: torch.Tensor
    shape: tuple[int, ...]
    box: Box | None
    boxes: list[Box]
    ranks: Ranks | None
    owner: nn.Module | None


def targets_of(model: nn.Module) -> list[Target]:
    """In the order of the model's state dict, tied ones once; without what is no tensor (a module's extra state)."""
    sharded = {
        id(param.shard): (
            tuple(param.full.shape),
            [flat.layout.box(index, rank) for rank in range(flat.ranks.shard.size)],
            flat.ranks,
        )
        for unit in units_of(model)
        for flat in unit.flats
        for index, param in enumerate(flat.params)
    }
    params = dict(model.named_parameters(remove_duplicate=False))
    found: dict[int, Target] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        tensor = params.get(name, value)
        if not torch.is_tensor(tensor):
            continue
        if id(tensor) in found:
            found[id(tensor)].names.append(name)
            continue
        owner = None if name in params else model.get_submodule(name.rpartition(".")[0])
        shape, boxes, ranks = sharded.get(id(tensor), (tuple(tensor.shape), [], None))
        found[id(tensor)] = Target([name], tensor, shape, box_of(tensor), boxes, ranks, owner)
    return list(found.values())


def begin(model: nn.Module, doing: str) -> Ranks | None:
    """Have the shards in place, and nothing gathered that would outlive a change of them; returns the ranks, None if not sharded.

    RuntimeError on all ranks in the middle of a step. Collective.
    """
    over = sharded_over(model)
    steps = {part._step for part in sharded_modules(model) if part._step is not None}
    with together(over, doing):
        for step in steps:
            step.tidy()
            if step.phase is not Phase.IDLE:
                raise RuntimeError(
                    "the model is in the middle of a step, or within unshard, where its parameters are full"
                )
    for unit in units_of(model):
        unit.reshard()
    return over


def together(over: Ranks | None, doing: str) -> AbstractContextManager[None]:
    """An error in the block on any rank is raised on all."""
    return nullcontext() if over is None else over.all.together(doing)
