"""`rounds`: what this rank trains in a step. `seed_all`: random numbers that do not depend on the rank."""

import hashlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from mpitrain.sharding.module import steps_of
from mpitrain.sharding.slices.rounds import Round, Slices
from mpitrain.sharding.unit.registry import slices_of


def rounds(model: nn.Module) -> Iterator[Round]:
    """The forwards and backwards of this rank in each step of a model with slices, in their order.

        for number, counts in mpitrain.rounds(model):
            mpitrain.seed_all(seed, step, number)  # if the model draws random numbers, as dropout does
            loss = criterion(model(inputs[number]), targets[number])  # slice `number` of the global batch
            loss.backward()
        optimizer.step()

    After the last round `.grad` of the shards is the mean of the slices' gradients. All ranks have the same number of rounds. Where
    `counts` is false, the rank has no slice left: it runs an earlier one again, because all ranks must take part in each round, and
    the gradient of this round is left out, and so is what it makes of buffers. Leave the loss out, too. A round may have several
    forwards, but one backward: add up its losses. `torch.autograd.grad` for inputs is no backward here.

    Raises:
        ValueError: the model has no slices.
        RuntimeError: at the next round, if a round did not have one backward, unless no round had any.
    """
    slices = slices_of(model)
    if slices is None:
        raise ValueError("rounds: the model has no slices; pass slices=..., a power of two, to fully_shard")
    return _compared(model, slices)


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


def seed_all(*numbers: int) -> None:
    """Seed torch (the CPU and all GPUs), NumPy's global generator and Python's `random` by some numbers, in 20 microseconds.

    Other numbers, or the same ones in another order, give other seeds. With slices call `seed_all(seed, step, slice)` before each
    forward: then dropout draws the same numbers at any number of ranks, and after a resume at any step. Activation checkpointing draws
    the same numbers in its second forward.
    """
    text = "/".join(map(str, numbers))
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"mpitrain.random").digest()
    number = int.from_bytes(digest, "little")
    torch.manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)
