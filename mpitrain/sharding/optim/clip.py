"""Clipping, and the norms of single gradients, of a plain model or one whose parameters are spread over ranks."""

import math
from itertools import chain

import torch
from torch import nn

from collectives import Communicator
from mpitrain.optim.exact_sums import SLOTS, block_sums, to_digits, to_float
from mpitrain.optim.norms import norm_of, norms_of_each
from mpitrain.optim.spread import counts_in_norms, is_ordered, rows_of, spread_of
from mpitrain.parts import stages_of
from mpitrain.sharding.step.step import living_steps


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
    over = _over(model)
    ordered = {comm for param, comm in over.items() if is_ordered(param)}
    spread: dict[Communicator | None, list[torch.Tensor]] = {comm: [] for comm in (*over.values(), None)}
    for param in params:
        if param.grad is not None and counts_in_norms(param):
            comm = over.get(param)
            spread[comm].append(rows_of(param, param.grad) if comm in ordered else param.grad)
    for step in living_steps():
        step.reducer.check_reduced(params, "clip_grad_norm_")
    norm = norm_of(spread, ordered=ordered)
    scale = max_norm / (norm.item() + 1e-6)
    grads = [param.grad for param in params if param.grad is not None]
    if grads and norm.isfinite() and scale < 1:
        torch._foreach_mul_(grads, scale)
    return norm


def _over(model: nn.Module) -> dict[torch.Tensor, Communicator]:
    """For each parameter that is spread over ranks, the ranks that hold one copy of the model."""
    return {param: spread.copy for param in model.parameters() if (spread := spread_of(param)) is not None}


@torch.no_grad()
def grad_norms(model: nn.Module) -> dict[str, float]:
    """The 2-norm of each parameter's whole gradient, by name, for the parameters with a gradient. Collective."""
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    stages = stages_of(model.parameters())  # of all parameters: a stage may train none
    names = list(trained if stages is None else dict.fromkeys(chain(*stages.all_gather_object(list(trained)))))
    grads = {name: param.grad for name, param in trained.items() if param.grad is not None}
    over = _over(model)
    if any(is_ordered(param) for param in over):
        sums = block_sums([rows_of(trained[name], grad) for name, grad in grads.items()])
        of_each, width = [to_digits(its) for its in sums], SLOTS
    else:
        of_each = [torch.tensor([norm * norm], dtype=torch.float64) for norm in norms_of_each(list(grads.values()))]
        width = 1
    total = torch.zeros(width + 1, len(names), dtype=torch.float64)  # the last row: how many ranks have a gradient
    column_of = {name: column for column, name in enumerate(names)}
    for name, square in zip(grads, of_each, strict=True):
        total[:width, column_of[name]] = square * counts_in_norms(trained[name])
        total[width, column_of[name]] = 1.0
    for comm in dict.fromkeys(over.values()):
        columns = torch.tensor([stages is not None or over.get(trained[name]) is comm for name in names])
        part = total[:, columns]
        comm.all_reduce(part)
        total[:, columns] = part
    return {
        name: math.sqrt(to_float(square))
        for name, (*square, there) in zip(names, total.T.tolist(), strict=True)
        if there
    }
