"""What precedes an optimizer's step on shards: no other rank reads them, and no gradient waits for its reduction."""

import functools
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mpitrain.optim.optimizer_checks import watch_optimizers
from mpitrain.placement.marks import box_of, first_cut
from mpitrain.sharding.setup.foreign import check_caller
from mpitrain.sharding.step.backward import living_steps
from mpitrain.torch_glue.torch_internals import keep_compiler_out, not_compiled


@functools.cache
def watch_steps() -> None:
    """Prepare and check every optimizer's steps from now on."""
    register_optimizer_step_pre_hook(_prepare)
    watch_optimizers()


@not_compiled
def _prepare(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    keep_compiler_out()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for step in living_steps():
        step.before_writes(params, f"{type(optimizer).__name__}.step")
    cut = first_cut(param for param in params if box_of(param) is not None)
    if cut is not None:
        check_caller(cut)
