"""Exchanges the values of parameters with other values of theirs, such as an average."""

from collections.abc import Mapping

import torch

from mpitrain.sharding.step.backward import living_steps


@torch.no_grad()
def swap_values(params: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    """Exchange the values of shards with `values` of the same names, in place. Between two steps, on all ranks together."""
    for step in living_steps():
        step.end_fence()
    for name, param in params.items():
        kept = param.detach().clone()
        param.copy_(values[name])
        values[name].copy_(kept)
