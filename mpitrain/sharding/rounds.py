"""`rounds`: what this rank trains in a step. `slice_mean`: the mean of a number over the slices."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import nn

from mpitrain.sharding.module import steps_of
from mpitrain.sharding.slices.rounds import Round, Slices
from mpitrain.sharding.slices.tree import tree_sum
from mpitrain.sharding.unit.unit import sharded_over, slices_of


def rounds(model: nn.Module) -> Iterator[Round]:
    """The forwards and backwards of this rank in each step of a model with slices, in their order.

        losses = []
        for number, counts in mpitrain.rounds(model):
            mpitrain.seed_all(seed, step, number)  # if the model draws random numbers, as dropout does
            loss = criterion(model(inputs[number]), targets[number])  # slice `number` of the global batch
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        mean = mpitrain.slice_mean(model, losses)

    After the last round `.grad` of the shards is the mean of the slices' gradients. All ranks have the same number of rounds. Where
    `counts` is false, the rank has no slice left: it runs an earlier one again, because all ranks must take part in each round, and
    the gradient of this round is left out, and so is what it makes of buffers. `slice_mean` leaves its loss out, too. A round may have
    several forwards, but one backward: add up its losses. `torch.autograd.grad` for inputs is no backward here.

    Raises:
        ValueError: the model has no slices.
        RuntimeError: at the next round, if a round did not have one backward, unless no round had any.
    """
    return _compared(model, _slices(model, "rounds"))


def slice_mean(model: nn.Module, values: Sequence[float | torch.Tensor] | torch.Tensor) -> float:
    """The mean over the slices of a number that each slice has, such as the loss of a step: the same bits at any number of ranks.

    Collective over the ranks with different data. All of them get it, in float64.

    Args:
        values: of this rank, one number for each of its `rounds`, in their order: floats, tensors with one element, or the losses that
            `step` of a pipeline returns. The number of a round that does not count is left out.

    Raises:
        ValueError: on all ranks, if the model has no slices, or if one rank has another number of values than rounds.
    """
    slices, ranks = _slices(model, "slice_mean"), sharded_over(model)
    assert ranks is not None
    comm, rounds = ranks.data_parallel, slices.rounds
    with comm.together("slice_mean"):
        if len(values) != len(rounds):
            raise ValueError(f"expected a number for each of {len(rounds)} rounds, got {len(values)}")
        for value in values:
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                raise ValueError(
                    f"expected one number for each round, got a tensor of shape {tuple(value.shape)}; take its mean"
                )
        pairs = zip(rounds, values, strict=True)
        places = slices.at_places((number, float(value)) for (number, counts), value in pairs if counts)
    return tree_sum(comm.all_reduce(np.array(places)).tolist()) / slices.count


def _slices(model: nn.Module, caller: str) -> Slices:
    slices = slices_of(model)
    if slices is None:
        raise ValueError(f"{caller}: the model has no slices; pass slices=..., a power of two, to fully_shard")
    return slices


def _compared(model: nn.Module, slices: Slices) -> Iterator[Round]:
    """The rounds, with a comparison of the model's backwards with their number."""
    begun = {step: step.num_backwards for step in steps_of(model)}

    def check(num_rounds: int) -> None:
        for step in steps_of(model):
            num = step.num_backwards - begun.get(step, 0)
            if num not in (0, num_rounds):  # a part of a model may have none, and a program may want the numbers alone
                raise RuntimeError(
                    f"rounds: {num} backward{'s' * (num != 1)} in {num_rounds} round{'s' * (num_rounds != 1)}, so gradients would be "
                    "added up in another order at another number of ranks; expected one in each round: add the losses of a round, and "
                    "call backward once"
                )

    for index, each in enumerate(slices.rounds):
        check(index)
        yield each
    check(slices.num_rounds)
