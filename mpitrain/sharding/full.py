"""Full parameters outside of forward and backward."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from mpitrain.sharding.module import outermost, sharded_modules, step_of
from mpitrain.sharding.step.step import Phase
from mpitrain.sharding.unit.registry import sharded_params


@contextmanager
def unshard(model: nn.Module) -> Iterator[nn.Module]:
    """Within `with unshard(model):` its parameters are the full ones, to be read: for exporting, tying, counting, generating.

    `model`: a model, or a part of one that has run. Collective: all ranks enter and leave it together. Forwards within keep what
    was gathered, so that a loop which generates gathers once. Do not write to full parameters: which ranks see it depends on where
    those live. Write to the shards, outside. RuntimeError within a forward, where parameters are full already. On a model without
    sharded parts it does nothing.
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
            param.shard.requires_grad_(param.full.requires_grad)  # which may have been frozen or thawed within
        for part in parts:
            step_of(part).let_go(part._unit)
        for step in steps:
            step.close()
