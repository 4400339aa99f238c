"""Full parameters outside of forward and backward."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from mpitrain.sharding.module import outermost, sharded_modules, step_of
from mpitrain.sharding.step.step import Phase
from mpitrain.sharding.unit.registry import sharded_params


@contextmanager
def unshard(model: nn.Module) -> Iterator[nn.Module]:
    """Within `with unshard(model):` the model's parameters are the full ones, for reading: to export, tie, count or generate.

    `model`: a model, or a part of a model that has run. Collective: all ranks enter and leave the block together. Forwards in the block
    keep the full parameters, so a loop that generates text gathers once. Do not write to full parameters, because the storage decides
    which ranks see the change; write to the shards outside of the block. RuntimeError within a forward, where parameters are full
    already. No effect on a model without sharded parts. With `wire_weights` below fp32 the full parameters have the values that forward
    and backward use; `mpitrain.full_state_dict` has those of the masters.
    """
    steps = list(dict.fromkeys(step_of(part) for part in outermost(model)))
    for step in steps:
        if step.phase is not Phase.IDLE:
            raise RuntimeError("unshard: the model is in the middle of a step, where its parameters are full already")
    parts = sharded_modules(model)
    for step in steps:
        step.open()
    for part in parts:
        step_of(part).hold(part._unit)
    try:
        yield model
    finally:
        for param in sharded_params(model):
            param.shard.requires_grad_(param.full.requires_grad)  # the block may have frozen or thawed the parameter
        for part in parts:
            step_of(part).let_go(part._unit)
        for step in steps:
            step.close()
