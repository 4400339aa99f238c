"""Norms of gradients that are spread over ranks."""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from collectives import Communicator
from mpitrain.parts import part_of
from mpitrain.sharding.step.step import living_steps
from mpitrain.sharding.unit.registry import params_by_shard


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale all gradients of a model so that their common 2-norm is at most `max_norm`; returns the norm before that.

    Collective on a sharded model: each rank adds the squares of its shards in float64, and one all-reduce adds the ranks, so the norm
    is the same for any number of ranks, up to rounding. Parameters that are the same on every rank (`ignored_params`) count once. A
    plain model works, too. The norm is a float64 scalar on the host. If it is not finite, the gradients are not scaled.
    """
    params = list(model.parameters())
    over = _over(model)
    spread: dict[Communicator | None, list[torch.Tensor]] = {comm: [] for comm in (*over.values(), None)}
    for param in params:
        if param.grad is not None and counts_in_norms(param):
            spread[over.get(param)].append(param.grad)
    for step in living_steps():
        step.reducer.check_reduced(params, "clip_grad_norm_")
    norm = norm_of(spread)
    scale = max_norm / (norm.item() + 1e-6)
    grads = [param.grad for param in params if param.grad is not None]
    if grads and norm.isfinite() and scale < 1:
        torch._foreach_mul_(grads, scale)
    return norm


def _over(model: nn.Module) -> dict[torch.Tensor, Communicator]:
    """For each parameter that is spread over ranks, the ranks that hold one copy of the model."""
    cut: dict[torch.Tensor, Communicator] = {
        param: part.over for param in model.parameters() if (part := part_of(param)) is not None
    }
    return {**cut, **{shard: param.ranks.copy for shard, param in params_by_shard(model).items()}}


def counts_in_norms(param: torch.Tensor) -> bool:
    """Whether this rank counts its part of a parameter: of ranks that hold the same part only the first does."""
    part = part_of(param)
    return part is None or part.is_first


def norm_of(spread: Mapping[Communicator | None, Sequence[torch.Tensor]], order: float = 2.0) -> torch.Tensor:
    """The norm of gradients as if they were one vector: a float64 scalar on the host. Collective.

    `spread`: for each communicator the gradients that are sharded over its ranks; None: gradients that are the same on every rank.
    ValueError for an order that is not above 0.
    """
    if not order > 0:
        raise ValueError(
            f"the norm of order {order} of gradients that are spread over ranks; expected an order above 0"
        )
    if order == math.inf:
        largest = torch.zeros((), dtype=torch.float64)
        for comm, grads in spread.items():
            norms = torch.tensor([0.0, *_norms(grads, order)], dtype=torch.float64)
            # A reduction by "max" may lose a NaN, so a flag says whether there is one.
            both = torch.stack([norms.nan_to_num(0.0, math.inf).max(), norms.isnan().any()])
            if comm is not None:
                comm.all_reduce(both, "max")
            largest = largest.maximum(torch.where(both[1] > 0, math.nan, both[0]))
        return largest
    powers = torch.tensor([_sum_of_powers(grads, order) for grads in spread.values()], dtype=torch.float64)
    for index, comm in enumerate(spread):
        if comm is not None:
            comm.all_reduce(powers[index : index + 1])
    return powers.sum().sqrt() if order == 2 else powers.sum() ** (1 / order)


def _sum_of_powers(grads: Sequence[torch.Tensor], order: float) -> float:
    """Over all elements: within a gradient at least in float32 (fast, and short enough), across gradients in float64."""
    total = 0.0
    for norm in _norms(grads, order):
        total += norm * norm if order == 2 else norm**order  # sum() rounds differently since Python 3.12
    return total


def _norms(grads: Sequence[torch.Tensor], order: float = 2.0) -> list[float]:
    """The norm of each gradient; 0 without elements. The host waits once for each device and dtype, not once for each gradient."""
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, grad in enumerate(grads):
        if grad.numel():
            alike.setdefault((grad.device, grad.dtype), []).append(index)
    norms = [0.0] * len(grads)
    for (_, dtype), indices in alike.items():
        found = torch._foreach_norm([grads[i] for i in indices], order, dtype=torch.promote_types(dtype, torch.float32))
        for index, norm in zip(indices, torch.stack(found).tolist(), strict=True):
            norms[index] = norm
    return norms


def all_finite(grads: Iterable[torch.Tensor]) -> bool:
    """Whether all elements of all gradients are finite. The host waits once for each device."""
    flags: dict[torch.device, list[torch.Tensor]] = {}
    for grad in grads:
        flags.setdefault(grad.device, []).append(grad.isfinite().all())
    return all(bool(torch.stack(of_device).all()) for of_device in flags.values())


@torch.no_grad()
def grad_norms(model: nn.Module) -> dict[str, float]:
    """The 2-norm of each parameter's whole gradient, by name, for the parameters with a gradient. Collective."""
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    names = [name for name, _ in trained]
    grads = {name: param.grad for name, param in trained if param.grad is not None}
    counts = {name: counts_in_norms(param) for name, param in trained}
    found = {n: norm * norm * counts[n] for n, norm in zip(grads, _norms(list(grads.values())), strict=True)}
    total = torch.tensor(
        [[found.get(name, 0.0) for name in names], [float(name in grads) for name in names]], dtype=torch.float64
    )
    over = _over(model)
    for comm in dict.fromkeys(over.values()):
        columns = torch.tensor([over.get(param) is comm for _, param in trained])
        part = total[:, columns]
        comm.all_reduce(part)
        total[:, columns] = part
    norms, anywhere = total[0].sqrt().tolist(), total[1].tolist()
    return {name: norm for name, norm, there in zip(names, norms, anywhere, strict=True) if there}
