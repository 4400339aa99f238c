"""Modules that run several times before one backward: the sums of all their gradients are reduced, once."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sharded_models import assert_same, shard
from torch import nn
from torch.utils.checkpoint import checkpoint

from collectives import Communicator
from mpitrain.sharding import unshard
from mpitrain.sharding.unit.unit import UnitState

pytestmark = pytest.mark.ranks(2)

X = torch.linspace(-1, 1, 8).reshape(2, 4)
Loss = Callable[[nn.Module], torch.Tensor]


class Net(nn.Module):
    """Blocks with parameters that nobody uses, of which `call` makes calls, each `times` times."""

    def __init__(self, call: Callable[..., torch.Tensor], times: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.call, self.times = call, times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in (self.first, *self.blocks):
            for _ in range(self.times):
                x = self.call(part, x)
        return x


def plainly(part: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return part(x)


def reentrant(part: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(part, x, use_reentrant=True)


def checkpointed(part: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(part, x, use_reentrant=False)


def within_itself(part: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A backward that runs the part again by a backward of its own, of which the graph of the outer one shows nothing."""
    return Again.apply(x, part)  # type: ignore[no-any-return]


class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, part: nn.Module) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.part = part
        return part(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.part(x)
        torch.autograd.backward(y, grad)
        return x.grad, None


def once(net: nn.Module) -> torch.Tensor:
    return net(X.clone().requires_grad_()).square().sum()


def of_itself(net: nn.Module) -> torch.Tensor:
    return net(net(X)).square().sum()


def of_two_inputs(net: nn.Module) -> torch.Tensor:
    return (net(X.clone().requires_grad_()) * net(2 * X.clone().requires_grad_())).square().sum()


def of_its_guess(net: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        guess = net(X)
    return net(X + guess).square().sum()


def steepness(net: nn.Module) -> torch.Tensor:
    x = X.clone().requires_grad_()
    y = net(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.square().sum() + slope.square().sum()


WAYS = {
    "resident": {"storage": "resident"},
    "private": {"storage": "private"},
    "private, kept for the backward": {"storage": "private", "reshard_after_forward": False},
}


def compare(
    comm: Communicator, way: str, make: Callable[[], nn.Module], run: Callable[[nn.Module], None], rtol: float
) -> None:
    plain = make()
    model = shard(copy.deepcopy(plain), comm, **WAYS[way])
    for _ in range(2):  # the second backward knows what the first one has met
        for net in (plain, model):
            net.zero_grad()
            run(net)
        assert_same(model, plain, grads=True, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("way", ["resident", "private"])
@pytest.mark.parametrize(
    ("loss_of", "call", "times"),
    [
        (of_itself, plainly, 1),
        (of_two_inputs, plainly, 2),
        (of_its_guess, plainly, 1),
        (steepness, plainly, 2),
        (once, reentrant, 1),
        (once, reentrant, 2),
        (of_two_inputs, reentrant, 1),
        (once, checkpointed, 2),
        (once, within_itself, 1),
        (once, within_itself, 2),
        (of_two_inputs, within_itself, 1),
    ],
)
def test_modules_that_run_twice(
    comm: Communicator, way: str, loss_of: Loss, call: Callable[..., torch.Tensor], times: int
) -> None:
    compare(comm, way, lambda: Net(call, times), lambda net: loss_of(net).backward(), 1e-4)


class Stacked(nn.Module):
    """Each block also runs without gradients, as for a target, within a forward that records a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            with torch.no_grad():
                target = block(x)
            x = block(x) - target.tanh()
        return x


def test_calls_without_gradients_keep_no_block_full_in_the_backward(comm: Communicator) -> None:
    """They could be those of a reentrant checkpoint, which runs them again, but the graph has none. Also after an evaluation."""
    model = shard(net := Stacked(), comm, storage="private", blocks=net.blocks)
    num_full: list[int] = []
    for block in net.blocks:
        for param in block._unit.params:
            param.full.register_post_accumulate_grad_hook(
                lambda full: num_full.append(sum(each._unit.state is UnitState.UNSHARDED for each in net.blocks))
            )
    for _ in range(2):
        model(X).sum().backward()
        with unshard(model), torch.no_grad():
            model(X)
    assert len(num_full) == 20 and max(num_full) <= 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loss_of", [once, of_itself])
def test_passes_in_one_block_of_autocast(comm: Communicator, way: str, loss_of: Loss) -> None:
    """The weights that autocast has cast belong to the pass that came first, also if it was an evaluation."""

    def run(net: nn.Module) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                net(X)
            loss_of(net).backward()
            with net.no_sync() if hasattr(net, "no_sync") else contextlib.nullcontext():
                loss_of(net).backward()
            loss_of(net).backward()

    compare(comm, way, lambda: Net(plainly), run, 0.05)  # bfloat16


class Cell(nn.Module):
    """A recurrent cell: its first call alone gets nothing that has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.unused = nn.Linear(8, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(x)
        for _ in range(4):
            state = torch.tanh(self.cell(torch.cat([x, state], -1)))
        return state


@pytest.mark.parametrize("way", ["resident", "private"])
def test_weight_tied_cells(comm: Communicator, way: str) -> None:
    compare(comm, way, lambda: nn.Sequential(Cell(), nn.Linear(4, 4)), lambda net: of_itself(net).backward(), 1e-4)


class Guided(nn.Module):
    """Its forward follows a gradient of its own output, then calls its blocks again, and uses a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.last = Net(plainly), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for create_graph in (False, True):
            (slope,) = torch.autograd.grad(self.last(self.net(x)).sum(), x, create_graph=create_graph)
            x = x - slope
        return self.last(self.net(x))


@pytest.mark.parametrize("way", ["resident", "private"])
def test_a_forward_that_takes_gradients(comm: Communicator, way: str) -> None:
    compare(comm, way, Guided, lambda net: net(X).square().sum().backward(), 1e-4)


@pytest.mark.parametrize("way", ["resident", "private"])
def test_two_models_that_train_through_each_other(comm: Communicator, way: str) -> None:
    """CycleGAN: each model runs on data and on what the other one made, and their optimizers take turns."""
    plain = [Net(plainly), Net(plainly, 2)]
    nets = [shard(copy.deepcopy(net), comm, **WAYS[way]) for net in plain]
    for one, other in (plain, nets):
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (one, other)]
        for turn in (0, 1, 0):
            loss = (one(other(X)) - X).square().sum() + (other(one(X)) - X).square().sum() + one(X.clone()).sum()
            loss.backward()
            optimizers[turn].step()
            one.zero_grad()
            other.zero_grad()
    for model, same in zip(nets, plain, strict=True):
        assert_same(model, same, grads=False, rtol=1e-4, atol=1e-5)
