"""Replacements for functions of torch that would see only this rank's rows of a parameter: see also `mpitrain.optim.torch_calls`."""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import clip_grad

from mpitrain.optim.torch_calls import around, params_of_clip, watch_norms
from mpitrain.placement.marks import box_of
from mpitrain.sharding.step.step import check_reduced, routes_of
from mpitrain.sharding.unit import rows
from mpitrain.sharding.unit.registry import all_sharded
from mpitrain.torch_glue.torch_internals import set_compiler, storage_of


@functools.cache
def watch_calls() -> None:
    """Install the replacements."""
    watch_norms()
    around(clip_grad, "_get_total_norm", _total_norm)
    around(torch.nn.utils, "get_total_norm", _total_norm)
    around(torch.amp.GradScaler, "_unscale_grads_", _unscale)
    around(torch.autograd, "_engine_run_backward", _run_backward)
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


def _run_backward(original: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
    """A backward, which the steps of the models on its way follow: RuntimeError if a shard is among the inputs that it asks for."""
    inputs = args[3] if len(args) > 3 else ()
    asked = {id(tensor) for tensor in inputs if box_of(tensor) is not None}
    param = next((param for param in all_sharded() if id(param.shard) in asked), None) if asked else None
    if param is not None:
        raise RuntimeError(
            f"torch.autograd.grad, or backward(inputs=...): {param.name} is sharded, and its shard is not part of the graph; call "
            "loss.backward(), after which param.grad has this rank's rows, averaged over the ranks"
        )
    compiler = set_compiler(None)  # of a compiled step of training: it would trace the hooks
    try:
        with routes_of(outputs, inputs):
            return original(outputs, *args, **kwargs)
    finally:
        if compiler is not None:
            set_compiler(compiler)
