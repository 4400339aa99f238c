"""Norms of gradients that are spread over ranks."""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from time import perf_counter
from typing import Literal

import numpy as np
import torch

from collectives import Communicator
from mpitrain.optim.exact_sums import block_sums, to_digits, to_float
from mpitrain.placement.marks import SumRanks, counts_in_sums, rows_of, sum_ranks_of


class NormTime:
    """The seconds that this process has spent in messages about norms so far, with the waits for other ranks."""

    seconds = 0.0


def reduce(comm: Communicator | None, values: torch.Tensor, op: str = "sum") -> None:
    """All-reduce in place; None: the values are the same on all ranks."""
    if comm is not None and comm.size > 1:
        began = perf_counter()
        comm.all_reduce(values, op)
        NormTime.seconds += perf_counter() - began


Parts = dict[SumRanks | None, list[torch.Tensor]]
"""For each group of ranks the gradients that count on this rank; None: gradients that are the same on every rank."""


def parts_of(grads: Iterable[tuple[torch.Tensor | None, torch.Tensor | None]], *, is_ordered: bool) -> Parts:
    """The gradients of parameters for `norm_of`. A parameter without a gradient tells its ranks, a gradient without one is whole."""
    parts: Parts = {}
    for param, grad in grads:
        counted = parts.setdefault(None if param is None else sum_ranks_of(param), [])
        if grad is not None and (param is None or counts_in_sums(param)):
            counted.append(rows_of(grad if param is None else param, grad) if is_ordered else grad)
    return parts


def norm_of(
    parts: Mapping[SumRanks | None, Sequence[torch.Tensor]], order: float = 2.0, *, is_ordered: bool
) -> torch.Tensor:
    """The norm of gradients as if they were one vector: a float64 scalar on the host. Collective.

    `is_ordered`: the norm has the same bits at any number of ranks. ValueError for an order that is not above 0.
    """
    if not order > 0:
        raise ValueError(
            f"the norm of order {order} of gradients that are spread over ranks; expected an order above 0"
        )
    if order == math.inf:
        # A reduction by "max" may lose a NaN, so a flag says whether there is one.
        largest, is_nan = _over_ranks({ranks: _largest(grads) for ranks, grads in parts.items()}, "max").tolist()
        return torch.tensor(math.nan if is_nan else largest, dtype=torch.float64)
    total = _over_ranks({ranks: _powers(grads, order, is_ordered) for ranks, grads in parts.items()}, "sum")
    powers = torch.tensor(to_float(total.tolist()), dtype=torch.float64)
    return powers.sqrt() if order == 2 else powers ** (1 / order)


def _over_ranks(messages: Mapping[SumRanks | None, torch.Tensor], op: Literal["sum", "max"]) -> torch.Tensor:
    """The messages together, each over its ranks, and those of a pipeline also over its stages. Collective."""
    of_stages: dict[Communicator | None, torch.Tensor] = {}
    for ranks, message in messages.items():
        over, stages = (None, None) if ranks is None else ranks
        reduce(over, message, op)
        before = of_stages.get(stages)
        of_stages[stages] = message if before is None else _together(before, message, op)
    for stages, message in of_stages.items():
        reduce(stages, message, op)
    return functools.reduce(lambda one, other: _together(one, other, op), of_stages.values())


def _together(one: torch.Tensor, other: torch.Tensor, op: Literal["sum", "max"]) -> torch.Tensor:
    return one + other if op == "sum" else one.maximum(other)


def _largest(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    norms = torch.tensor([0.0, *norms_of_each(grads, math.inf)], dtype=torch.float64)
    return torch.stack([norms.nan_to_num(0.0, math.inf).max(), norms.isnan().any().double()])


def _powers(grads: Sequence[torch.Tensor], order: float, is_ordered: bool) -> torch.Tensor:
    """The sum of the powers of all elements: a message for `to_float`."""
    if is_ordered:
        return to_digits(np.concatenate([np.empty(0), *block_sums(grads, order)]))
    return torch.tensor([_sum_of_powers(grads, order)], dtype=torch.float64)


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
