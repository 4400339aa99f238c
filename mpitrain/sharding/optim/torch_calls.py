"""Replacements for functions of torch that would see only this rank's rows of a parameter: see also `mpitrain.optim.torch_calls`."""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import clip_grad

from mpitrain.optim.torch_calls import around, params_of_clip, watch_norms
from mpitrain.sharding.step.backward import check_reduced, run_backward
from mpitrain.sharding.unit import rows
from mpitrain.sharding.unit.unit import all_sharded
from mpitrain.torch_glue.torch_internals import storage_of


@functools.cache
def watch_calls() -> None:
    """Install the replacements."""
    watch_norms()
    around(clip_grad, "_get_total_norm", _total_norm)
    around(torch.nn.utils, "get_total_norm", _total_norm)
    around(torch.amp.GradScaler, "_unscale_grads_", _unscale)
    around(torch.autograd, "_engine_run_backward", run_backward)
    around(torch.optim.Optimizer, "state_dict", rows.state_dict_of)
    around(torch.optim.Optimizer, "load_state_dict", rows.load_state_dict)
    for way in ("_share_fd_cpu_", "_share_filename_cpu_"):
        around(torch.UntypedStorage, way, functools.partial(_share, os.getpid()))


def _total_norm(original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
    """`get_total_norm`, and so `clip_grad_norm_`: RuntimeError if gradients wait to be reduced."""
    grads = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if (clipped := params_of_clip()) is not None:
        check_reduced(clipped, "clip_grad_norm_")
    else:
        asked = set(map(id, grads))
        check_reduced((param.shard for param in all_sharded() if id(param.shard.grad) in asked), "get_total_norm")
    return original(grads, *args, **kwargs)


def _unscale(
    original: Callable[..., Any], scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any
) -> Any:
    """The check of `torch.amp.GradScaler` for overflows, and the division by its scale. RuntimeError if gradients wait."""
    check_reduced((param for group in optimizer.param_groups for param in group["params"]), "GradScaler.unscale_")
    return original(scaler, optimizer, *args)


def _share(process: int, original: Callable[..., Any], storage: torch.UntypedStorage, *args: Any) -> Any:
    """A tensor on its way to another process. torch moves it to memory of torch's own: RuntimeError if it is a parameter's."""
    if os.getpid() == process:  # a worker of a data loader moves only what it has itself
        memory = storage._cdata
        for param in all_sharded():
            if memory in (storage_of(param.full), storage_of(param.shard)):
                raise RuntimeError(
                    f"share_memory_, or a tensor for another process: the memory of {param.name} belongs to a sharded model and "
                    "must stay where it is; share a copy (param.detach().clone())"
                )
    return original(storage, *args)
