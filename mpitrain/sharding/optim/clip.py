"""Clipping, and the norms of single gradients, of a plain model or one whose parameters are spread over ranks."""

import math
from itertools import chain

import torch
from torch import nn

from collectives import Communicator
from mpitrain.optim.exact_sums import SLOTS, block_sums, to_digits, to_float
from mpitrain.optim.norms import norm_of, norms_of_each, parts_of, reduce
from mpitrain.placement.marks import counts_in_sums, is_ordered, rows_of, sum_ranks_of
from mpitrain.placement.parts import stages_of
from mpitrain.sharding.step.backward import check_reduced


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale all gradients of a model so that their common 2-norm is at most `max_norm`; returns the norm before that.

    Collective on a model that is sharded or cut: each rank adds the squares of its parts' norms in float64, and one all-reduce adds the
    ranks, so the norm is the same for any number of ranks, up to rounding, and to the bit if the model has slices. Parameters that are
    the same on every rank count once. A plain model works, too. The norm is a float64 scalar on the host. If it is not finite, the
    gradients are not scaled. TypeError for what is no model. On CPUs, and without slices, torch adds the squares of one gradient in
    float32, so the norm of a rank's part of 8 million elements is 2e-4 too small, and that of 32 million 2e-3.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"clip_grad_norm_: expected the model, got {type(model).__name__}; torch's own takes its parameters"
        )
    params = list(model.parameters())
    check_reduced(params, "clip_grad_norm_")
    ordered = any(map(is_ordered, params))
    norm = norm_of(parts_of(((param, param.grad) for param in params), is_ordered=ordered), is_ordered=ordered)
    scale = max_norm / (norm.item() + 1e-6)
    grads = [param.grad for param in params if param.grad is not None]
    if grads and norm.isfinite() and scale < 1:
        torch._foreach_mul_(grads, scale)
    return norm


@torch.no_grad()
def grad_norms(model: nn.Module) -> dict[str, float]:
    """The 2-norm of each parameter's whole gradient, by name, for the parameters with a gradient. Collective."""
    check_reduced(model.parameters(), "grad_norms")
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    stages = stages_of(model.parameters())  # of all parameters: a stage may train none
    names = list(trained if stages is None else dict.fromkeys(chain(*stages.all_gather_object(list(trained)))))
    grads = {name: param.grad for name, param in trained.items() if param.grad is not None}
    if any(map(is_ordered, model.parameters())):
        sums = block_sums([rows_of(trained[name], grad) for name, grad in grads.items()])
        of_each, width = [to_digits(its) for its in sums], SLOTS
    else:
        of_each = [torch.tensor([norm * norm], dtype=torch.float64) for norm in norms_of_each(list(grads.values()))]
        width = 1
    total = torch.zeros(width + 1, len(names), dtype=torch.float64)  # the last row: how many ranks have a gradient
    column_of = {name: column for column, name in enumerate(names)}
    for name, square in zip(grads, of_each, strict=True):
        if counts_in_sums(trained[name]):
            total[:width, column_of[name]] = square
        total[width, column_of[name]] = 1.0
    columns: dict[Communicator | None, list[int]] = {}
    for name, param in trained.items():
        columns.setdefault(None if (ranks := sum_ranks_of(param)) is None else ranks.over, []).append(column_of[name])
    for comm, its in columns.items():
        part = total[:, its]
        reduce(comm, part)
        total[:, its] = part
    reduce(stages, total)  # each stage has zeros for the parameters of the others
    return {
        name: math.sqrt(to_float(square))
        for name, (*square, there) in zip(names, total.T.tolist(), strict=True)
        if there
    }
