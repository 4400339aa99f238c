"""Ranks that do not use the same modules, and losses that are differentiated twice."""

import copy

import pytest
import torch
from parity_models import Mixture, regression_loss
from sharded_models import STORAGES, assert_same, mine, pair_of, shard
from torch import nn
from ways import WAYS

from collectives import Communicator
from mpitrain.sharding import fully_shard, sharded_params
from mpitrain.sharding.module import sharded_modules

pytestmark = pytest.mark.ranks(1, 2, 3)


class Choice(nn.Module):
    """A rank runs those parts that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor, which: list[int]) -> torch.Tensor:
        x = self.first(x)
        for index in which:
            x = self.parts[index](x)
        return x


X = torch.arange(12.0).view(3, 4) / 12
PLANS = [[[0]], [[0], [1, 1, 0]], [[2, 1], [], [0, 0, 0], [1]]]  # of the ranks in turn, for a number of steps


@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_run_different_parts_different_numbers_of_times(comm: Communicator, way: str) -> None:
    model, plain = pair_of(Choice, comm, way, units="one" if "private" in way else "auto")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (model, plain)]
    for plan in PLANS:
        model(X, plan[comm.rank % len(plan)]).square().sum().backward()
        (sum(plain(X, plan[rank % len(plan)]).square().sum() for rank in range(comm.size)) / comm.size).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, plain, grads=False, rtol=1e-4, atol=1e-5)


def test_different_units_of_one_size_are_found_out(comm: Communicator) -> None:
    """The gathers of part 0 and part 1 meet, without an error of their own."""
    model, plain = pair_of(Choice, comm, storage="private")
    if comm.size == 1:
        model(X, [0]).sum().backward()  # nothing is gathered, anything goes
        return
    loss = model(X, [comm.rank % 2]).sum()
    with pytest.raises(RuntimeError, match="the ranks ran different sharded modules"):
        loss.backward()
    model.zero_grad()
    model(X, [0]).sum().backward()
    plain(X, [0]).sum().backward()
    assert_same(model.parts[0], plain.parts[0], grads=True, rtol=1.3e-6, atol=1e-5)


@pytest.mark.parametrize("storage", STORAGES)
def test_experts_are_in_the_unit_of_their_layer(comm: Communicator, storage: str) -> None:
    for by_layers in (True, False):
        model = Mixture()
        shard(model, comm, blocks=model.layers if by_layers else (), storage=storage)
        assert [type(m).__name__ for m in sharded_modules(model)] == [
            "ShardedMixture",
            "ShardedExperts",
            "ShardedExperts",
        ]


@pytest.mark.parametrize("storage", STORAGES)
def test_an_exception_while_activations_are_computed_again(comm: Communicator, storage: str) -> None:
    torch.manual_seed(0)
    model = Mixture()
    plain = copy.deepcopy(model)
    times = 0

    def checkpointed(layer: nn.Module) -> None:
        call = layer.forward

        def fail_second(x: torch.Tensor) -> torch.Tensor:
            nonlocal times
            times += 1
            if times == 3:
                raise ArithmeticError("computed again")
            return call(x)

        layer.forward = lambda x: torch.utils.checkpoint.checkpoint(fail_second, x, use_reentrant=False)

    for layer in model.layers:
        checkpointed(layer)
    fully_shard(model, comm, storage=storage)
    with pytest.raises(ArithmeticError, match="computed again"):
        regression_loss(model, 0, mine(comm)).backward()
    model.zero_grad()  # tidies up
    if storage == "private" and comm.size > 1:
        assert all(param.full.untyped_storage().size() == 0 for param in sharded_params(model))
    regression_loss(model, 1, mine(comm)).backward()
    regression_loss(plain, 1, slice(None)).backward()
    assert_same(model, plain, grads=True, rtol=1e-4, atol=1e-6)
