"""Checks that need the whole model, and so run at its first forward.

A call of `fully_shard` for a part does not see the model around it: what `keep_fp32` and `ignored_params` name may be in other parts.
Parameters and buffers from the meta device get values after `fully_shard`.
"""

from collections.abc import Sequence

from torch import nn

from collectives import Communicator
from mpitrain.sharding.setup.blocks import check_names
from mpitrain.sharding.unit.unit import Unit, kind_of


def check_ready(model: nn.Module, units: Sequence[Unit], comm: Communicator) -> None:
    """At the first forward: ValueError or RuntimeError on all ranks for unused arguments and for missing values. Collective."""
    asked = [unit.promise for unit in units if unit.promise is not None]
    check_names(model, {pattern for promise in asked for pattern in promise.keep_fp32})
    inside = {id(param) for param in model.parameters()}
    for param in (param for promise in asked for param in promise.ignored_params):
        if id(param) not in inside:
            raise ValueError(
                f"fully_shard: ignored_params had a parameter of shape {tuple(param.shape)} that this {kind_of(model).__name__} does "
                "not have"
            )
    with comm.together():
        _check_values(model, units)


def _check_values(model: nn.Module, units: Sequence[Unit]) -> None:
    without = [param.name for unit in units for param in unit.params if param.lacks_values]
    if without:
        raise RuntimeError(
            f"{some(without)} came from the meta device and never got values; before the first forward call mpitrain.initialize, "
            "mpitrain.load or mpitrain.load_weights, or write to the shards"
        )
    without = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if without:
        raise RuntimeError(
            f"{some(without)}: buffers on the meta device, without memory; give them values before the first forward: assign tensors "
            "(module.buffer = torch...), or replace the part that has them by one made on the CPU; mpitrain.load and "
            "mpitrain.load_weights fill buffers of the state dict, mpitrain.initialize BatchNorm's: see docs/sharding.md"
        )


def some(names: Sequence[str]) -> str:
    """The first names of a list, for a message."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
