"""Gradients of gradients (create_graph=True), in all ways of sharding: against plain torch."""

from collections.abc import Callable

import pytest
import torch
from sharded_models import BATCH, assert_same, floats, mine, pair_of, shard
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint
from ways import WAYS, spread

from collectives import Communicator
from mpitrain.sharding import fully_shard
from mpitrain.sharding.module import units_of
from mpitrain.sharding.unit.unit import UnitState

pytestmark = pytest.mark.ranks(1, 2, 3)


class Net(nn.Module):
    """An embedding and a head around blocks, of which one runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)) for _ in range(3))
        self.head = nn.Linear(6, 2)
        self.checkpoints = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.hidden = torch.tanh(self.first(x))
        for number in (0, 1, 0, 2):
            block = self.blocks[number]
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x))
        return self.head(torch.tanh(x))


def batch(seed: int) -> torch.Tensor:
    return floats(seed, 5).requires_grad_()


def slope(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    return grad


def penalty(m: Net, seed: int, rows: slice) -> None:
    """Of the gradient of the inputs (WGAN-GP), with the loss itself."""
    x = batch(seed)[rows]
    loss = m(x).square().mean()
    (loss + slope(loss * len(x), x).square().mean()).backward()


def penalty_alone(m: Net, seed: int, rows: slice) -> None:
    x = batch(seed)[rows]
    slope(m(x).square().sum(), x).square().mean().backward()


def of_hidden(m: Net, seed: int, rows: slice) -> None:
    """Of the gradient of what no module has as its input, where no input needs a gradient."""
    loss = m(batch(seed)[rows].detach()).square().sum()
    slope(loss, m.hidden).square().mean().backward()


def forwards_between(m: Net, seed: int, rows: slice) -> None:
    """Other forwards, and a backward, between the gradient and its backward."""
    x = batch(seed)[rows]
    grad = slope(m(x).square().sum(), x)
    other = m(batch(seed + 100)[rows].detach()).square().mean()
    with torch.no_grad():
        m(x)
    other.backward()
    grad.square().mean().backward()


def thrice(m: Net, seed: int, rows: slice) -> None:
    """A gradient of a gradient of a gradient."""
    x = batch(seed)[rows]
    grad = slope(slope(m(x).square().sum(), x).square().sum(), x)
    (grad.square().mean() * 1e-2).backward()


def ordinary(m: Net, seed: int, rows: slice) -> None:
    mse_loss(m(batch(seed)[rows].detach()), torch.zeros(1, 2).expand(BATCH, 2)[rows]).backward()


def twice_through(m: Net, seed: int, rows: slice) -> None:
    """No second derivative, but one graph gone through twice."""
    loss = m(batch(seed)[rows]).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


KINDS: list[Callable[[Net, int, slice], None]] = [
    penalty, penalty_alone, of_hidden, forwards_between, thrice, twice_through,
]  # fmt: skip


@pytest.mark.rest
@pytest.mark.parametrize(
    ("kind", "way", "checkpoints"),
    [(*each, (i + i // len(WAYS)) % 2 == 1) for i, each in enumerate(spread(KINDS, WAYS))],
)
def test_steps_equal_the_plain_model(comm: Communicator, way: str, kind: Callable, checkpoints: bool) -> None:
    """Steps with second derivatives and without in turn; all is given back when the next forward has ended."""
    model, plain = pair_of(Net, comm, way, lambda model: model.blocks)
    model.checkpoints = plain.checkpoints = checkpoints
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for step, run in enumerate([kind, ordinary, kind]):
        run(model, step, mine(comm))
        run(plain, step, slice(None))
        assert_same(model, plain, grads=True, rtol=1e-3, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(model(batch(0)), plain(batch(0)), rtol=1e-3, atol=1e-4)
    assert all(unit.lasts or unit.state is UnitState.SHARDED for unit in units_of(model))


@pytest.mark.parametrize(
    "end", ["a step of the optimizer", "reshard", "a forward after another backward", "an optimizer of another model"]
)
def test_full_parameters_stay_for_the_graph_until(comm: Communicator, end: str) -> None:
    """What ends it, and that a backward which comes later is torch's error where their memory is gone."""
    model = fully_shard(Net(), comm, units="one", storage="private")
    passing = comm.size > 1  # on one rank full parameters last
    x = batch(0)
    grad = slope(model(x).square().sum(), x)
    (unit,) = units_of(model)
    model(batch(1).detach())  # a forward that comes before is none that ends it
    assert unit.state is (UnitState.HIDDEN if passing else UnitState.SHARDED)
    other = nn.Linear(2, 2)
    if end == "a step of the optimizer":
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    elif end == "reshard":
        model.reshard()
    elif end == "a forward after another backward":
        model(batch(1).detach()).sum().backward()
        assert unit.state is (UnitState.HIDDEN if passing else UnitState.SHARDED), "the backward alone does not end it"
        with torch.no_grad():
            model(batch(1))
    else:
        other(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        assert unit.state is (UnitState.HIDDEN if passing else UnitState.SHARDED)
        grad.square().sum().backward()
        return
    assert unit.state is UnitState.SHARDED
    if passing:
        error = "written between a forward and its backward" if "step" in end else "modified by an inplace operation"
        with pytest.raises(RuntimeError, match=error):
            grad.square().sum().backward()


class Inner(nn.Module):
    """One unit, with an activation inside that others differentiate by."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 6), nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = torch.tanh(self.first(x))
        return torch.tanh(self.norm(self.hidden))


def test_a_graph_nobody_watches_raises_once_its_parameters_are_gone(comm: Communicator) -> None:
    """It would compute with no memory behind them."""
    inner = Inner()
    model = shard(nn.Sequential(inner, nn.Linear(6, 2)), comm, blocks=[inner], storage="private")
    x = batch(0).detach()
    grad = slope(model(x).square().sum(), inner.hidden)
    model(x).sum().backward()
    model(x)
    if comm.size == 1:  # nothing is given back
        grad.square().sum().backward()
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            grad.square().sum().backward()
    model(x).sum().backward()  # and the next step is one as any other


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_a_gradient_keeps_its_graph_on_one_rank(comm: Communicator) -> None:
    """That of a scalar too, whose shard is a vector."""
    if comm.size > 1:
        pytest.skip("needs one rank: elsewhere gradients are reduced, which no graph goes through")

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.weight = nn.Parameter(torch.tensor(3.0)), nn.Parameter(torch.tensor([1.0, 2.0]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale**2 * (self.weight * x).sum()

    model = fully_shard(Scaled(), comm)
    model(torch.tensor([1.0, 1.0])).backward(create_graph=True)
    for param in model.parameters():
        assert param.grad is not None and param.grad.grad_fn is not None
    assert model.scale.grad.tolist() == [18.0]
