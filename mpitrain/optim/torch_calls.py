"""Replacements for functions of torch that would see only this rank's part of a gradient.

A script may import torch's public functions before it shards or cuts a model. So this module replaces inner functions, which torch
looks up at each call. With the replacements the public functions return the result for whole parameters.
"""

import functools
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grad

from collectives import Communicator
from mpitrain.optim.norms import norm_of
from mpitrain.optim.spread import all_spread, counts_in_norms, everyone_of, is_ordered, rows_of


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
    """`get_total_norm` of `torch.nn.utils`, and so `clip_grad_norm_`, of whole gradients. Collective if some are spread over ranks."""
    grads = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    over = {
        id(param.grad): (param, spread.copy)
        for param, spread in all_spread()
        if spread.copy.size > 1 or spread.is_ordered
    }
    found = [over.get(id(grad), (None, None)) for grad in grads]
    ordered = {comm for param, comm in found if param is not None and is_ordered(param)}
    parts: dict[Communicator | None, list[torch.Tensor]] = {}
    for grad, (param, comm) in zip(grads, found, strict=True):
        counted = parts.setdefault(comm, [])
        if param is None or counts_in_norms(param):
            counted.append(rows_of(param, grad) if param is not None and comm in ordered else grad)
    if not grads or list(parts) == [None]:
        return original(grads, norm_type, error_if_nonfinite, foreach)
    norm = norm_of(parts, float(norm_type), ordered)
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
