"""`rounds`: what this rank trains in a step. `seed_all`: random numbers that do not depend on the rank."""

import hashlib
import random

import numpy as np
import torch
from torch import nn

from mpitrain.sharding.slices.rounds import Round
from mpitrain.sharding.unit.registry import slices_of


def rounds(model: nn.Module) -> list[Round]:
    """The forwards and backwards of this rank in each step of a model with slices, in their order.

        for number, counts in mpitrain.rounds(model):
            mpitrain.seed_all(seed, step, number)  # if the model draws random numbers, as dropout does
            loss = criterion(model(inputs[number]), targets[number])  # slice `number` of the global batch
            loss.backward()
        optimizer.step()

    After the last round `.grad` of the shards is the mean of the slices' gradients. All ranks have the same number of rounds. Where
    `counts` is false, the rank has no slice left: it runs an earlier one again, because all ranks must take part in each round, and
    the gradient of this round is left out, and so is what it makes of buffers. Leave the loss out, too. ValueError if the model has no
    slices.
    """
    slices = slices_of(model)
    if slices is None:
        raise ValueError("rounds: the model has no slices; pass slices=..., a power of two, to fully_shard")
    return slices.rounds


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
