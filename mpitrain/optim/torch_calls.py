"""Replacements for functions of torch that would see only this rank's part of a gradient.

A script may import torch's public functions before it shards or cuts a model. So this module replaces inner functions, which torch
looks up at each call. With the replacements the public functions return the result for whole parameters.
"""

import functools
import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch.nn.utils import clip_grad

from mpitrain.optim.norms import norm_of, parts_of
from mpitrain.placement.marks import all_spread, everyone_of, is_ordered, sum_ranks_of


@functools.cache
def watch_norms() -> None:
    """Install the replacements."""
    around(clip_grad, "_get_total_norm", _total_norm)
    around(torch.nn.utils, "get_total_norm", _total_norm)
    around(torch.amp.GradScaler, "_unscale_grads_", _unscale)


def around(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Replace `owner.name` by `call(original, ...)`."""
    original = getattr(owner, name, None)
    if original is None:
        warnings.warn(
            f"torch {torch.__version__} has no {owner.__name__}.{name}: on models that are spread over ranks use "
            "mpitrain.clip_grad_norm_ and mpitrain.GradScaler, because torch's functions see only this rank's part",
            RuntimeWarning,
            stacklevel=2,
        )
        return

    replaced = functools.update_wrapper(functools.partial(call, original), original)
    setattr(owner, name, _method(replaced) if isinstance(owner, type) else replaced)


def _method(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` as a function, which becomes a method of a class, as a partial object does not."""

    @functools.wraps(call)
    def method(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return method


def _total_norm(
    original: Callable[..., torch.Tensor],
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """`get_total_norm` of `torch.nn.utils`, and so `clip_grad_norm_`, of whole gradients. Collective if some are spread over ranks."""
    grads = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    pairs: list[tuple[torch.Tensor | None, torch.Tensor | None]]
    if (params := params_of_clip()) is not None:
        pairs = [(param if _needs_ranks(param) else None, param.grad) for param in params]
    else:
        spread = {id(param.grad): param for param, _ in all_spread() if param.grad is not None and _needs_ranks(param)}
        pairs = [(spread.get(id(grad)), grad) for grad in grads]
    ordered = any(param is not None and is_ordered(param) for param, _ in pairs)
    parts = parts_of(pairs, is_ordered=ordered)
    if list(parts) in ([], [None]):
        return original(grads, norm_type, error_if_nonfinite, foreach)
    norm = norm_of(parts, float(norm_type), is_ordered=ordered)
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {norm.item()} over all ranks, so that they cannot be clipped; "
            "error_if_nonfinite=False scales the gradients by this norm"
        )
    if not grads:
        return norm.float()
    return norm.to(grads[0].device, torch.promote_types(grads[0].dtype, torch.float32).to_real())


def _needs_ranks(param: torch.Tensor) -> bool:
    """Whether a norm of the gradient needs other ranks, or an order of its own."""
    ranks = sum_ranks_of(param)
    return ranks is not None and (is_ordered(param) or any(comm is not None and comm.size > 1 for comm in ranks))


def params_of_clip() -> list[torch.Tensor] | None:
    """The parameters of the call of `clip_grad_norm_` that this is a part of; None outside of one.

    It passes on the gradients that this rank has. But each rank must take part in the sums over other ranks that have more: those of an
    ignored parameter that this rank has not used, or of a stage of a pipeline while this one is frozen.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not _CLIP.__code__:
        frame = frame.f_back
    return None if frame is None else list(frame.f_locals["parameters"])


_CLIP: Any = inspect.unwrap(clip_grad.clip_grad_norm_)


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
    for comm in everyone_of(param for group in optimizer.param_groups for param in group["params"]):
        flag = torch.tensor([max((value.item() for value in found.values()), default=-1.0)])
        comm.all_reduce(flag, "max")
        if flag < 0:
            continue  # no rank has a gradient: torch raises an error
        if not found:
            found[found_inf.device] = found_inf
        for value in found.values():
            value.fill_(flag.item())
    return found
