"""How activations leave a block: as its output or past it, changed in place, or in objects. All compute what plain torch does."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from sharded_models import assert_same, shard
from torch import nn

import mpitrain
from collectives import Communicator

pytestmark = pytest.mark.ranks(2)

X = torch.linspace(-1, 1, 24).reshape(2, 3, 4)


class Masked(nn.Module):
    """A part of the output, such as the padding of a vocabulary, is masked in place."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.head(x)  # with three dimensions and a bias torch returns a view
        y[..., 4:] = -1e4
        return y


@dataclass
class Output:
    x: torch.Tensor
    others: Any = None


class Own:
    def __init__(self, x: torch.Tensor) -> None:
        self.inner = {"x": [x]}


class Block(nn.Module):
    def __init__(self, leaves: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.leaves = leaves

    def forward(self, x: torch.Tensor) -> Any:
        x += 1  # the input of a block may be written to
        self.kept = torch.tanh(self.first(x))
        return self.leaves(self.last(self.kept))


class Net(nn.Module):
    """`leaves`: what a block makes of its output. `comes`: what the model makes of that."""

    def __init__(
        self, leaves: Callable[[torch.Tensor], Any], comes: Callable[[Any, torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block(leaves) for _ in range(2))
        self.comes = comes

    def forward(self, x: torch.Tensor) -> Output:
        hidden = [self.first(x)]
        for block in self.blocks:
            x = hidden[-1].clone()
            hidden.append(self.comes(block(x), x))
        return Output(hidden[-1], {"hidden": hidden})


def added(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y += x
    return y


def masked(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y.view(-1)[:3] = 0
    y[..., 2:] *= 2
    return y


NETS = {
    "masked": Masked,
    "added in place": lambda: Net(lambda y: y, added),
    "views changed in place": lambda: Net(lambda y: y[..., :], masked),
    "dataclasses": lambda: Net(lambda y: Output(y, [y * 2]), lambda out, x: out.x + out.others[0]),
    "objects": lambda: Net(Own, lambda out, x: out.inner["x"][0]),
    "tuples": lambda: Net(lambda y: ((y,), {"z": [y * 3]}), lambda out, x: out[0][0] + out[1]["z"][0]),
}


def output(net: nn.Module) -> torch.Tensor:
    out = net(X)
    return (out.x if isinstance(out, Output) else out).square().sum()


def hidden_states(net: nn.Module) -> torch.Tensor:
    return sum(x.square().sum() for x in net(X).others["hidden"])


def kept_activations(net: nn.Module) -> torch.Tensor:
    net(X)
    return sum(block.kept.square().sum() for block in net.blocks)


def one_of_them(net: nn.Module) -> torch.Tensor:
    net(X)
    return net.blocks[0].kept.square().sum()


LOSSES = [(name, output) for name in NETS] + [
    ("dataclasses", hidden_states),
    ("objects", kept_activations),
    ("added in place", one_of_them),
]


@pytest.mark.rest
@pytest.mark.parametrize("way", ["stage 3", "stage 3, private"])
@pytest.mark.parametrize(("name", "loss_of"), LOSSES)
def test_gradients_are_those_of_plain_torch(
    comm: Communicator, way: str, name: str, loss_of: Callable[[nn.Module], torch.Tensor]
) -> None:
    torch.manual_seed(0)
    plain = NETS[name]()
    model = shard(copy.deepcopy(plain), comm, way)
    for _ in range(2):  # the second backward knows what the first one has met
        for net in (plain, model):
            net.zero_grad()
            loss_of(net).backward()
        assert_same(model, plain, grads=True, rtol=1e-4, atol=1e-5)


def in_place(net: nn.Module) -> torch.Tensor:
    y = net(X).x
    y[:, 0] = 0.0
    return y.square().sum()


@pytest.mark.parametrize("way", ["stage 1, private", "stage 3", "stage 3, private"])
@pytest.mark.parametrize("loss_of", [output, in_place, kept_activations])
@pytest.mark.parametrize("between", ["write", "write and a forward"])
def test_a_write_before_the_backward_is_noticed(
    comm: Communicator, way: str, loss_of: Callable[[nn.Module], torch.Tensor], between: str
) -> None:
    model = shard(NETS["dataclasses"](), comm, way)
    x = torch.ones(1, requires_grad=True)
    loss, of_inputs = loss_of(model) * x, loss_of(model) * x
    kept = model.blocks[0].kept
    with torch.no_grad():
        for param in model.parameters():
            param += 1
    if "forward" in between:
        model(X)
    error = "written between a forward and its backward"
    with pytest.raises(RuntimeError, match=error):
        loss.backward()
    with pytest.raises(RuntimeError, match=error):
        torch.autograd.grad(of_inputs, [x, kept])
    loss_of(model).backward()  # and the next step is as any other


class Empty(nn.Sequential):
    """A module that is false, as a container without parts."""

    def __len__(self) -> int:
        return 0


class Pair(nn.Module):
    """Two networks against each other in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = (Empty(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2))
        self.frozen = copy.deepcopy(self.maker).requires_grad_(False)


def against_each_other(pair: Pair, num_steps: int) -> list[float]:
    """Two steps of the judge come between the maker's forward and backward. A frozen part is written before that backward, too."""
    optimizers = [torch.optim.Adam(part.parameters(), lr=0.1) for part in (pair.maker, pair.judge)]
    losses = []
    for _ in range(num_steps):
        made = pair.maker(X)
        for _ in range(2):
            (pair.judge(made.detach()).square().mean() - pair.judge(X).mean()).backward()
            optimizers[1].step()
            pair.zero_grad()
        pair.judge.requires_grad_(False)
        loss = pair.judge(made).square().mean() + (pair.frozen.forward(X) - made).square().mean()
        params = dict(pair.named_parameters())  # waits until no rank reads them
        with torch.no_grad():
            torch._foreach_mul_([params[name] for name in params if "frozen" in name], 0.5)
        loss.backward()
        pair.judge.requires_grad_(True)
        optimizers[0].step()
        pair.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("way", ["stage 1, private", "stage 3", "stage 3, private"])
@pytest.mark.parametrize("are_units", [False, True])
def test_a_write_to_other_parts_leaves_a_backward_alone(comm: Communicator, way: str, are_units: bool) -> None:
    torch.manual_seed(0)
    plain = Pair()
    model = copy.deepcopy(plain)
    shard(model, comm, way, blocks=[model.maker, model.judge, model.frozen] if are_units else ())
    for part in (model.maker, model.judge, model.frozen):
        mpitrain.register_forward_method(part, "forward")
    torch.testing.assert_close(against_each_other(model, 3), against_each_other(plain, 3), rtol=1e-4, atol=1e-5)
    assert_same(model, plain, grads=False, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", ["stage 3", "stage 3, private"])
def test_a_forward_and_its_backward_within_unshard(comm: Communicator, way: str) -> None:
    torch.manual_seed(0)
    plain = NETS["objects"]()
    model = shard(copy.deepcopy(plain), comm, way)
    kept_activations(plain).backward()
    with mpitrain.unshard(model):
        kept_activations(model).backward()
    assert_same(model, plain, grads=True, rtol=1e-4, atol=1e-5)
    with mpitrain.unshard(model):
        loss = kept_activations(model)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    with pytest.raises(RuntimeError, match="written between a forward and its backward"):
        loss.backward()


@pytest.mark.parametrize("way", ["stage 3", "stage 3, private"])
def test_a_backward_through_another_model_is_none_of_this_one(comm: Communicator, way: str) -> None:
    """As in training against each other: only models on its way follow a backward, and a rank may run others alone."""
    model, other = shard(NETS["tuples"](), comm, way), shard(NETS["objects"](), comm, way)
    loss, of_other = output(model), output(other)
    if comm.rank == 0:
        nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    of_other.backward()
    assert all(param.grad is None for param in model.parameters())
    loss.backward()
    assert any(param.grad is not None for param in model.parameters())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_gradients_within_transforms_of_functions(comm: Communicator) -> None:
    """torch.func calls the same backward for tensors whose leaves no graph of a sharded model knows."""
    model = shard(NETS["objects"](), comm, "stage 3, private")
    loss = output(model)
    cube = torch.func.hessian(lambda x: (x**3).sum())(torch.ones(2))
    assert cube.tolist() == [[6, 0], [0, 6]]
    loss.backward()
