"""Norms of gradients that are spread over ranks."""

from collections.abc import Iterable

import torch
from torch import nn

from mpitrain.sharding.module import sharded_over
from mpitrain.sharding.reductions import check_reduced


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale all gradients of a model so that their common 2-norm is at most `max_norm`; returns the norm before that.

    Collective on a sharded model: each rank adds the squares of its shards in float64, one all-reduce adds the ranks, so that the
    norm does not depend on how many there are (but for rounding). What is on every rank alike (`ignored_params`) counts once. A
    plain model works too. The norm is a float64 scalar on the host; a non-finite norm scales nothing.
    """
    over = sharded_over(model)
    shards = [p for p in model.parameters() if hasattr(p, "shard_box")]
    others = [p for p in model.parameters() if not hasattr(p, "shard_box")]
    check_reduced(shards, "clip_grad_norm_")
    squares = _squares(shards)
    if over is not None:
        over.shard.all_reduce(squares)
    norm = (squares + _squares(others)).sqrt()
    scale = max_norm / (norm.item() + 1e-6)
    if norm.isfinite() and scale < 1:
        for param in (*shards, *others):
            if param.grad is not None:
                param.grad.mul_(scale)
    return norm


def _squares(params: Iterable[nn.Parameter]) -> torch.Tensor:
    """The sum of the squares of all gradients, a float64 scalar on the host."""
    total = torch.zeros((), dtype=torch.float64)
    for param in params:
        if param.grad is not None and param.grad.numel():
            # Per parameter in float32 at least (fast, and short enough), across parameters and ranks in float64.
            dtype = torch.promote_types(param.grad.dtype, torch.float32)
            total += torch.linalg.vector_norm(param.grad, dtype=dtype).double().cpu() ** 2
    return total


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """This rank's gradients that have elements."""
    return [param.grad for param in model.parameters() if param.grad is not None and param.grad.numel()]


@torch.no_grad()
def grad_norms(model: nn.Module) -> dict[str, float]:
    """The 2-norm of each parameter's whole gradient, by name; parameters without one are left out. Collective, one message."""
    names, squares, sharded = [], [], []
    for name, param in model.named_parameters():
        if param.requires_grad:
            names.append(name)
            squares.append(_squares([param]))
            sharded.append(hasattr(param, "shard_box"))
    has_grad = torch.tensor([float(param.grad is not None) for param in model.parameters() if param.requires_grad])
    total = torch.stack([torch.stack(squares), has_grad.double()]) if names else torch.zeros(2, 0, dtype=torch.float64)
    over = sharded_over(model)
    if over is not None:
        alone = total.clone()
        over.shard.all_reduce(total)
        keep = ~torch.tensor(sharded)
        total[:, keep] = alone[:, keep]  # on every rank alike
    norms, anywhere = total[0].sqrt().tolist(), total[1].tolist()
    return {name: norm for name, norm, there in zip(names, norms, anywhere, strict=True) if there}
