"""Random numbers of forwards that depend neither on the rank nor on the division of a model into stages.

A stage of a pipeline does not know how many numbers the stages before it have drawn. So each training forward of a model with slices
seeds all generators again at each *place*: after each block of the model's `StagePlan`, where a pipeline may divide the model. The seed
of a place follows from the number of blocks before it and from the seed that the forward began with. The next forward begins with the
seed of the last place, so two forwards of a round draw different numbers.

Activation checkpointing keeps the states of torch's generators at the begin of a block, and draws from them in the second forward.
"""

import hashlib
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from mpitrain.plans.stage_plan import StagePlan
from mpitrain.plans.transformers_plan import stage_plan_of_transformers


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


_begun: int | None = None  # the seed that the forward under way began with; hooks get no argument


@contextmanager
def seeded_at_places() -> Iterator[None]:
    """Let a forward in the block seed the generators at its places."""
    global _begun
    _begun = torch.initial_seed()
    try:
        yield
    finally:
        _begun = None


def plan_of(model: nn.Module) -> StagePlan | None:
    """The plan of the stages of a model; None if it brings none along."""
    with suppress(ValueError):  # of a transformers model that cannot be divided
        plan: StagePlan | None = getattr(model, "stage_plan", None) or stage_plan_of_transformers(model)
        return plan
    return None


def mark_places(model: nn.Module) -> None:
    """Mark the places of a whole model, if it has a plan."""
    if (plan := plan_of(model)) is not None:
        mark_places_after(enumerate(model.get_submodule(plan.blocks).children()))


def mark_places_after(blocks: Iterable[tuple[int, nn.Module]]) -> None:
    """Mark the places after some blocks, each with its number in the whole model, or after what stands in the place of one."""
    for number, block in blocks:
        block.register_forward_hook(partial(_seed, number + 1))


def _seed(place: int, block: nn.Module, args: Any, output: Any) -> None:
    if _begun is not None:
        seed_all(_begun, place)
