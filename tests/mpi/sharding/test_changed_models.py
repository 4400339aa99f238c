"""A model that is changed after fully_shard: an error on all ranks where the change would be lost, else it works."""

import functools
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from sharded_models import STORAGES
from torch import nn
from ways import spread

from collectives import Communicator
from mpitrain.sharding import fully_shard

pytestmark = pytest.mark.ranks(1, 2)

Change = Callable[[nn.Sequential], None]
WIDTH = 8  # so that each of four ranks has rows of each unit: one without could not tell that its memory was replaced


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) * self.scale


def sharded(comm: Communicator, storage: str) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(2)]
    return fully_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks), comm, storage=storage)


def wrap(model: nn.Sequential) -> None:
    model[1][0] = Adapter(model[1][0])


def append(model: nn.Sequential) -> None:
    model.append(nn.Linear(WIDTH, WIDTH))


def replace_module(model: nn.Sequential) -> None:
    model[0] = nn.Linear(WIDTH, WIDTH)


def replace_parameter(model: nn.Sequential) -> None:
    model[1][0].weight = nn.Parameter(torch.ones(WIDTH, WIDTH))


def give_a_bias(model: nn.Sequential) -> None:
    model[1][2].bias = nn.Parameter(torch.ones(WIDTH))


def register(model: nn.Sequential) -> None:
    model[2].register_parameter("extra", nn.Parameter(torch.ones(WIDTH)))


def delete(model: nn.Sequential) -> None:
    del model[1][0].weight


def replace_memory(model: nn.Sequential) -> None:
    for param in model.parameters():
        param.data = torch.ones_like(param)


def cast_a_part(model: nn.Sequential) -> None:
    model[2][0].double()


CHANGES = [wrap, append, replace_module, replace_parameter, give_a_bias, register, delete, replace_memory, cast_a_part]
CAUGHT_BY_A_BACKWARD = [replace_parameter, delete, replace_memory, cast_a_part]
PUT_BACK = [replace_parameter, delete]  # by the backward that caught the change

refused = functools.partial(pytest.raises, RuntimeError, match="replaced after fully_shard")


def name_of(value: object) -> str | None:
    return getattr(value, "__name__", None)


@pytest.mark.rest
@pytest.mark.parametrize(
    ("change", "storage", "when"), spread(CHANGES, STORAGES, ["before the first forward", "later"]), ids=name_of
)
def test_parameters_added_or_replaced_are_refused(comm: Communicator, change: Change, storage: str, when: str) -> None:
    model, x = sharded(comm, storage), torch.ones(2, WIDTH)
    if when == "later":
        model(x).sum().backward()
    change(model)
    with refused():
        model(x)


@pytest.mark.parametrize(("change", "storage"), spread(CHANGES, STORAGES), ids=name_of)
def test_parameters_replaced_between_forward_and_backward(comm: Communicator, change: Change, storage: str) -> None:
    model, x = sharded(comm, storage), torch.ones(2, WIDTH)
    model(x).sum().backward()
    loss = model(x).sum()
    change(model)
    with refused() if change in CAUGHT_BY_A_BACKWARD else nullcontext():
        loss.backward()
    with nullcontext() if change in PUT_BACK else refused():
        model(x).sum().backward()


@pytest.mark.parametrize("storage", STORAGES)
def test_parts_without_parameters_may_come_and_parts_may_go(comm: Communicator, storage: str) -> None:
    model, x = sharded(comm, storage), torch.randn(2, WIDTH)
    y = model(x)
    model[1].append(nn.Identity())
    model.insert(0, nn.Identity())
    torch.testing.assert_close(model(x), y)
    del model[3]
    model(x).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
