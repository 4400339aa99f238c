"""Full parameters outside of forward and backward."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from mpitrain.sharding.module import context_of, outermost, sharded_params, states_of
from mpitrain.sharding.step.context import Phase


@contextmanager
def unshard(model: nn.Module) -> Iterator[nn.Module]:
    """Within `with unshard(model):` its parameters are the full ones, to be read: for exporting, tying, counting, generating.

    `model`: a model, or a part of one that has run. Collective: all ranks enter and leave it together. Forwards within keep what
    was gathered, so that a loop which generates gathers once. Do not write to full parameters: which ranks see it depends on where
    those live. Write to the shards, outside. RuntimeError within a forward, where parameters are full already. On a model without
    sharded parts it does nothing.
    """
    states = states_of(model)
    contexts = list(dict.fromkeys(context_of(part) for part in outermost(model)))
    for context in contexts:
        if context.phase is not Phase.IDLE:
            raise RuntimeError("unshard: the model is in the middle of a step, where its parameters are full already")
    for context in contexts:
        context.open()
    for state in states:
        state.hold()
    try:
        yield model
    finally:
        for param in sharded_params(model):
            param.shard.requires_grad_(param.full.requires_grad)  # which may have been frozen or thawed within
        for state in states:
            state.let_go()
        for context in contexts:
            context.close()
