"""Norms of gradients that are spread over ranks."""

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from time import perf_counter

import numpy as np
import torch

from collectives import Communicator
from mpitrain.optim.exact_sums import block_sums, to_digits, to_float


class Spent:
    """The seconds that this process has spent in messages about norms so far, with the waits for other ranks."""

    seconds = 0.0


def reduce(comm: Communicator | None, values: torch.Tensor, op: str = "sum") -> None:
    """All-reduce in place; None: the values are the same on all ranks."""
    if comm is not None:
        began = perf_counter()
        comm.all_reduce(values, op)
        Spent.seconds += perf_counter() - began


def norm_of(
    spread: Mapping[Communicator | None, Sequence[torch.Tensor]],
    order: float = 2.0,
    ordered: Container[Communicator | None] = (),
) -> torch.Tensor:
    """The norm of gradients as if they were one vector: a float64 scalar on the host. Collective.

    `spread`: for each communicator the gradients that are sharded over its ranks; None: gradients that are the same on every rank.
    `ordered`: the communicators for which the norm has the same bits at any number of ranks. Their gradients are matrices of rows.
    ValueError for an order that is not above 0.
    """
    if not order > 0:
        raise ValueError(
            f"the norm of order {order} of gradients that are spread over ranks; expected an order above 0"
        )
    if order == math.inf:
        largest = torch.zeros((), dtype=torch.float64)
        for comm, grads in spread.items():
            norms = torch.tensor([0.0, *norms_of_each(grads, order)], dtype=torch.float64)
            # A reduction by "max" may lose a NaN, so a flag says whether there is one.
            both = torch.stack([norms.nan_to_num(0.0, math.inf).max(), norms.isnan().any()])
            reduce(comm, both, "max")
            largest = largest.maximum(torch.where(both[1] > 0, math.nan, both[0]))
        return largest
    messages = [
        to_digits(np.concatenate([np.empty(0), *block_sums(grads, order)]))
        if comm in ordered
        else torch.tensor([_sum_of_powers(grads, order)], dtype=torch.float64)
        for comm, grads in spread.items()
    ]
    for comm, message in zip(spread, messages, strict=True):
        reduce(comm, message)
    if ordered:
        messages = [torch.tensor([to_float(message.tolist())], dtype=torch.float64) for message in messages]
    powers = torch.cat(messages)
    return powers.sum().sqrt() if order == 2 else powers.sum() ** (1 / order)


def _sum_of_powers(grads: Sequence[torch.Tensor], order: float) -> float:
    """Over all elements: within a gradient at least in float32 (fast, and short enough), across gradients in float64."""
    total = 0.0
    for norm in norms_of_each(grads, order):
        total += norm * norm if order == 2 else norm**order  # sum() rounds differently since Python 3.12
    return total


def norms_of_each(grads: Sequence[torch.Tensor], order: float = 2.0) -> list[float]:
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
