"""Activation checkpointing: the activations of a block are not kept for the backward, which computes them again.

A checkpointed block keeps its class, parts and names. It gets an attribute `forward` that calls the `forward` of its class.
`fully_shard` works around both, so the order of the two functions makes no difference: when the block's gradient comes, its full
parameters are filled, and the second computation uses them.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mpitrain.sharding.setup.blocks import stacked_blocks


def checkpoint_activations(model: nn.Module, blocks: Iterable[nn.Module] | None = None) -> nn.Module:
    """Let blocks of a model keep only their inputs, and compute their activations again in the backward; returns the model.

    The second computation takes one more forward of the blocks, up to a third of a step's time. Memory has the activations of only one
    block at a time (Chen et al. 2016, "Training deep nets with sublinear memory cost"). torch's non-reentrant checkpoint gives
    gradients with the same bits, also with dropout by torch's generators. The call may come before or after `fully_shard`, and keeps
    the names of parameters. Side effects of a block's forward, such as BatchNorm's in training, happen twice. Caches of keys and values
    must be off (`use_cache=False` in transformers).

    Args:
        model: changed in place.
        blocks: parts of the model; None: the blocks of its stacks, as `fully_shard` finds them.

    Raises:
        ValueError: no blocks, a block that is not in the model, or a block that is checkpointed already.
    """
    chosen = stacked_blocks(model) if blocks is None else list(blocks)
    if not chosen:
        raise ValueError(
            f"checkpoint_activations: this {type(model).__name__} has no stack of blocks; pass the parts to checkpoint as blocks=..."
        )
    parts = {id(part) for part in model.modules()}
    for block in chosen:
        if id(block) not in parts:
            raise ValueError(f"checkpoint_activations: this {type(block).__name__} is not part of the model")
        if isinstance(block.forward, partial) and block.forward.func is _checkpointed:
            raise ValueError(f"checkpoint_activations: this {type(block).__name__} is checkpointed already")
        # Not a closure: a copy of the block must run the copy's forward.
        block.forward = partial(_checkpointed, block.forward)
    return model


def _checkpointed(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # By position: torch's function has its own keywords, and protects only positional arguments against in-place changes.
    return checkpoint(_run, forward, tuple(kwargs), *args, *kwargs.values(), use_reentrant=False)


def _run(forward: Callable[..., Any], names: tuple[str, ...], *values: Any) -> Any:
    count = len(values) - len(names)
    return forward(*values[:count], **dict(zip(names, values[count:], strict=True)))
