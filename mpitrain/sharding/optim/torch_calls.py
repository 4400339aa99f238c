"""Replacements for functions of torch that would see only this rank's rows of a parameter.

A script may import torch's public functions before it calls `fully_shard`. So this module replaces inner functions, which torch looks
up at each call. With the replacements the public functions return the result for whole parameters, or raise an error.
"""

import functools
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grad

from collectives import Communicator
from mpitrain.sharding.optim.clip import counts_in_norms, norm_of
from mpitrain.sharding.unit import rows
from mpitrain.sharding.unit.marks import box_of
from mpitrain.sharding.unit.registry import all_sharded


@functools.cache
def watch_calls() -> None:
    """Install the replacements."""
    _around(clip_grad, "_get_total_norm", _total_norm)
    _around(torch.nn.utils, "get_total_norm", _total_norm)
    _around(torch.amp.GradScaler, "_unscale_grads_", _unscale)
    _around(torch.autograd, "_engine_run_backward", _run_backward)
    _around(torch.optim.Optimizer, "state_dict", rows.state_dict_of)
    _around(torch.optim.Optimizer, "load_state_dict", rows.load_state_dict)


def _around(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Replace `owner.name` by `call(original, ...)`."""
    original = getattr(owner, name, None)
    if original is None:
        warnings.warn(
            f"torch {torch.__version__} has no {owner.__name__}.{name}: on sharded models use mpitrain.clip_grad_norm_ and "
            "mpitrain.GradScaler, because torch's functions see only this rank's rows",
            RuntimeWarning,
            stacklevel=2,
        )
        return

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return call(original, *args, **kwargs)

    setattr(owner, name, replaced)


def _total_norm(
    original: Callable[..., torch.Tensor],
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """`get_total_norm` of `torch.nn.utils`, and so `clip_grad_norm_`, over all rows. Collective if some gradients are sharded."""
    grads = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    over = {id(param.shard.grad): param for param in all_sharded() if param.ranks.copy.size > 1}
    spread: dict[Communicator | None, list[torch.Tensor]] = {}
    for grad in grads:
        param = over.get(id(grad))
        counted = spread.setdefault(None if param is None else param.ranks.copy, [])
        if param is None or counts_in_norms(param.shard):
            counted.append(grad)
    if not grads or list(spread) == [None]:
        return original(grads, norm_type, error_if_nonfinite, foreach)
    norm = norm_of(spread, float(norm_type))
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {norm.item()} over all ranks, so that they cannot be clipped; "
            "error_if_nonfinite=False scales the gradients by this norm"
        )
    return norm.to(grads[0].device, torch.promote_types(grads[0].dtype, torch.float32).to_real())


def _unscale(
    original: Callable[..., dict[torch.device, torch.Tensor]],
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    inv_scale: torch.Tensor,
    found_inf: torch.Tensor,
    *more: Any,
) -> dict[torch.device, torch.Tensor]:
    """The overflows that `torch.amp.GradScaler` finds in gradients: an overflow on one rank counts on all ranks. Collective."""
    found = original(scaler, optimizer, inv_scale, found_inf, *more)
    over = {id(param.shard): param.ranks.everyone for param in all_sharded() if param.ranks.everyone.size > 1}
    params = [id(param) for group in optimizer.param_groups for param in group["params"]]
    for comm in dict.fromkeys(over[param] for param in params if param in over):  # in the same order on all ranks
        flag = torch.tensor([max((value.item() for value in found.values()), default=-1.0)])
        comm.all_reduce(flag, "max")
        if flag < 0:
            continue  # no rank has a gradient: torch raises an error
        if not found:
            found[found_inf.device] = found_inf
        for value in found.values():
            value.fill_(flag.item())
    return found


def _run_backward(original: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
    """A backward for the gradients of chosen tensors (`torch.autograd.grad`): RuntimeError if a shard is among them."""
    asked = {id(tensor) for tensor in (args[3] if len(args) > 3 else ()) if box_of(tensor) is not None}
    param = next((param for param in all_sharded() if id(param.shard) in asked), None) if asked else None
    if param is not None:
        raise RuntimeError(
            f"torch.autograd.grad, or backward(inputs=...): {param.name} is sharded, and its shard is not part of the graph; call "
            "loss.backward(), after which param.grad has this rank's rows, averaged over the ranks"
        )
    return original(outputs, *args, **kwargs)
