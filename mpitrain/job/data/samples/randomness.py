"""The generators of random numbers of Python, NumPy and torch, which datasets use for augmentation."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from mpitrain.job.data.order import keys_of


def seed_generators(*what: object) -> None:
    """Seed the three generators of this process. The text of `what` alone decides what they draw."""
    import torch

    first, second, third = (int(key) for key in keys_of(*what)[:3])
    random.seed(first)
    np.random.seed(second % 2**32)
    torch.default_generator.manual_seed(
        third % 2**63
    )  # not torch.manual_seed: it also queues a call for each kind of device


@contextmanager
def generators_kept() -> Iterator[None]:
    """A block after which the three generators go on as if it had drawn nothing."""
    import torch

    of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.default_generator.set_state(of_torch)
