"""The states of random generators as a row of bytes."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from mpitrain.job.train.checkpoints import random_states
from mpitrain.plans.draws import seed_all

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    yield
    torch.set_rng_state(before[0])
    np.random.set_state(before[1])
    random.setstate(before[2])


def draw() -> list[float]:
    return [
        *torch.randn(3).tolist(),
        torch.rand(()).item(),
        *np.random.random(3).tolist(),
        float(np.random.randint(2**31)),
        random.random(),
        float(random.getrandbits(40)),
    ]


def test_unpack_brings_back_what_pack_saw() -> None:
    seed_all(3, 0)
    draw()  # in the middle of each generator's block
    row = random_states.pack(CPU)
    expected = draw()
    seed_all(4, 1)
    other = random_states.pack(CPU)
    assert row.dtype == np.uint8 and row.shape == other.shape and row.shape[0] == 1
    assert draw() != expected
    random_states.unpack(row, CPU)
    assert draw() == expected
    random_states.unpack(row, CPU)
    assert (random_states.pack(CPU) == row).all()


def test_every_rank_and_seed_draws_something_else_and_the_same_again() -> None:
    draws = {}
    for seed, rank in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        seed_all(seed, rank)
        draws[seed, rank] = draw()
        seed_all(seed, rank)
        assert draw() == draws[seed, rank]
    for index in range(len(draws[0, 0])):
        assert len({values[index] for values in draws.values()}) == 4
