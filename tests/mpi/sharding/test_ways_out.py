"""How activations leave a block: as its output or past it, changed in place, or in objects. All compute what plain torch does."""

import copy
from collections.abc import Callable

import pytest
import torch
from sharded_models import assert_same, shard
from torch import nn
from ways import WAYS

from collectives import Communicator

pytestmark = pytest.mark.ranks(2)


class Masked(nn.Module):
    """A part of the output, such as the padding of a vocabulary, is masked in place."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.head(x)  # with three dimensions and a bias torch returns a view
        y[..., 4:] = -1e4
        return y


X = torch.linspace(-1, 1, 24).reshape(2, 3, 4)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [Masked])
def test_gradients_are_those_of_plain_torch(comm: Communicator, way: str, make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    plain = make()
    model = shard(copy.deepcopy(plain), comm, way)
    for net in (plain, model):
        net(X).square().sum().backward()
    assert_same(model, plain, grads=True, rtol=1e-5, atol=1e-6)
