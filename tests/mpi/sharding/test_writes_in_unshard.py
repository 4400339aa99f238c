"""Writes inside of `unshard`: an error that says what has become of them, or with `write=True` new values of the shards."""

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from sharded_models import floats, shard
from torch import nn
from ways import WAYS

import mpitrain
from collectives import Communicator
from mpitrain.sharding import fully_shard, unshard

pytestmark = pytest.mark.ranks(2)


class Model(nn.Module):
    """A stack, tied weights, a scalar, a frozen part, a buffer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.stem = nn.Linear(5, 5, bias=False)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 5)) for _ in range(2))
        self.head = nn.Linear(5, 5)
        self.head.weight = self.stem.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Linear(5, 3).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.frozen(self.head(x) * self.scale)


@torch.no_grad()
def change(model: nn.Module) -> None:
    """Writes by several ways, which depend on the whole of each parameter."""
    for param in model.parameters():
        param.mul_(0.9).add_(param.norm(), alpha=0.01)
    model.frozen.bias[1] = 0.7
    nn.init.constant_(model.layers[1][0].bias, 0.25)
    model.layers[0][0].weight.data.copy_(model.layers[0][0].weight.data.flip(0))


def assert_full(comm: Communicator, model: nn.Module, expected: nn.Module) -> None:
    found = mpitrain.full_state_dict(model)
    for name, value in expected.state_dict().items() if comm.rank == 0 else ():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("way", WAYS)
def test_writes_to_copies_are_written_back(comm: Communicator, way: str) -> None:
    model, plain = shard(Model(), comm, way), Model()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (model, plain)]
    for step in range(2):
        shards = list(model.parameters())
        with unshard(model, write=True):
            change(model)
            with torch.no_grad():
                inside = model(floats(step, 5))  # an initialisation may look at activations
        change(plain)
        assert all(now is before for now, before in zip(model.parameters(), shards, strict=True))
        torch.testing.assert_close(inside, plain(floats(step, 5)))
        if step == 0:
            assert_full(comm, model, plain)
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            m(floats(step, 5)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(model(floats(9, 5)), plain(floats(9, 5)), rtol=1e-5, atol=1e-5)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("storage", ["resident", "private"])
def test_masters_keep_their_bits(comm: Communicator, storage: str) -> None:
    policy = mpitrain.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model, plain = fully_shard(Model(), comm, storage=storage, mp_policy=policy), Model()
    model(floats(0, 5)).sum().backward()
    with unshard(model, write=True):
        assert model.stem.weight.dtype == torch.float32
        with torch.no_grad():
            model.stem.weight[2] += 1e-4
    with torch.no_grad():
        plain.stem.weight[2] += 1e-4
    assert_full(comm, model, plain)


def test_a_part_is_written_alone(comm: Communicator) -> None:
    """A block, a part without a unit of its own, and a model on the meta device that was never initialised."""
    with torch.device("meta"):
        model = Model()
    fully_shard(model, comm, storage="private")
    plain = Model()
    with unshard(model, write=True):
        model.load_state_dict(plain.state_dict())
    for m, context in ((model, unshard), (plain, lambda part, write: nullcontext())):
        for part in (m.layers[1], m.head):
            with context(part, write=True), torch.no_grad():
                for param in part.parameters():
                    param += param.sum()
    assert_full(comm, model, plain)
    torch.testing.assert_close(model(floats(0, 5)), plain(floats(0, 5)))


FATES = {
    "stage 0": "damaged, because",
    "stage 2, private": "damaged, because",
    "stage 3": "damaged, because",
    "stage 3, private": "not damaged, but the new values are lost",
}


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("way", FATES)
def test_a_write_to_the_full_parameters_is_an_error(comm: Communicator, way: str) -> None:
    model = shard(Model(), comm, way)
    fate = FATES[way] if comm.size > 1 else "not damaged, and this only rank has the new values"
    for writers in ([0], range(comm.size)):
        with pytest.raises(RuntimeError) as error, unshard(model), torch.no_grad():  # noqa: PT012
            if comm.rank in writers:
                model.head.bias.add_(1)
                model.frozen.weight[0] = 0
        expected = ("head.bias", "frozen.weight", fate, "unshard(model, write=True)")
        assert all(part in str(error.value) for part in expected) and "stem" not in str(error.value)
    if fate.startswith("not damaged, but"):
        assert_full(comm, model, Model())
    with unshard(model):  # the model goes on
        model(floats(0, 5)).sum().backward()
    model.zero_grad()


def test_masters_are_not_damaged_by_a_write_to_rounded_values(comm: Communicator) -> None:
    policy = mpitrain.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = fully_shard(Model(), comm, mp_policy=policy)
    before = model(floats(0, 5))
    with pytest.raises(RuntimeError, match=r"stem\.weight: not damaged, but"), unshard(model), torch.no_grad():
        model.stem.weight.zero_()
    assert_full(comm, model, Model())
    torch.testing.assert_close(model(floats(0, 5)), before, rtol=0, atol=0)


def _replaced(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    model.head.bias = nn.Parameter(torch.zeros(5))


def _stepped(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    optimizer.step()


def _one_rank(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    if rank == 0:
        nn.init.zeros_(model.head.bias)


def _differently(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    nn.init.constant_(model.head.bias, rank)
    nn.init.zeros_(model.stem.weight)


def _by_data(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    if rank == 0:
        model.stem.weight.data[-1] = 7  # not a row of this rank


def _of_another_shape(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    if rank == 0:
        model.stem.weight.data = torch.zeros(7, 3)


def _failed(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    nn.init.zeros_(model.head.bias)
    if rank == 1:
        raise ValueError("a mistake of the program")


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    model(floats(0, 5)).sum().backward()


def _saved(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    mpitrain.full_state_dict(model)
    mpitrain.load_full_state_dict(model, {})


def _nested(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    with unshard(model):
        pass


@pytest.mark.parametrize(
    ("act", "found"),
    [
        (_replaced, "parameter head.bias was replaced"),
        (_stepped, "shards were written"),
        (_one_rank, "only some ranks have written to some of head.bias"),
        (_differently, r"have written different values to head\.bias\. Each"),
        (_by_data, r"have written different values to stem\.weight\. Each"),
        (_of_another_shape, r"on rank 0: parameter stem\.weight was replaced"),
        (_failed, "a mistake of the program|on rank 1: the block ended with ValueError"),
        (_trained, "a backward inside"),
        (_saved, "within unshard"),
        (_nested, "is within `unshard"),
    ],
)
def test_what_a_block_must_not_do(comm: Communicator, act: Callable[..., None], found: str) -> None:
    model = fully_shard(Model(), comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(floats(0, 5)).sum().backward()
    before = copy.deepcopy(mpitrain.full_state_dict(model))
    with pytest.raises((RuntimeError, ValueError), match=found), unshard(model, write=True):
        act(model, optimizer, comm.rank)
    after = mpitrain.full_state_dict(model)
    assert act is _stepped or all(torch.equal(after[name], value) for name, value in before.items())
    model(floats(0, 5)).sum().backward()


@pytest.mark.parametrize("way", ["stage 0", "copies of shards", "copies of shards, private", "stage 2, private"])
def test_ranks_that_write_different_values_by_data_are_told(comm: Communicator, way: str) -> None:
    model, plain = shard(Model(), comm, way), Model()
    torch.manual_seed(comm.rank)
    with pytest.raises(RuntimeError, match=r"different values to head\.bias"), unshard(model, write=True):
        model.head.bias.data.normal_()
    torch.manual_seed(1)
    for m, context in ((model, unshard(model, write=True)), (plain, nullcontext())):
        with context:
            m.head.bias.data.fill_(0.5)
            m.layers[0][0].weight.data = m.layers[0][0].weight.data * 2
    assert_full(comm, model, plain)


@pytest.mark.parametrize("way", ["stage 0", "stage 3", "stage 3, private"])
def test_the_whole_model_is_not_called_with_copies_of_a_part(comm: Communicator, way: str) -> None:
    model = shard(Model(), comm, way)
    parts = [
        model.layers[0],
        *([] if way == "stage 0" else [model.head]),
    ]  # of the unit of a block, and of the outermost one
    for part in parts:
        with unshard(part, write=True):
            part(torch.ones(2, 5))
            with pytest.raises(RuntimeError, match=r"a forward of the model within `unshard\(part, write=True\)`"):
                model(floats(0, 5))
            with torch.no_grad():
                next(part.parameters()).mul_(2)  # goes on
    with pytest.raises(RuntimeError, match=r"parameter stem\.weight was replaced"), unshard(model):
        model.stem.weight.data = torch.zeros(5, 5)
    plain = Model()
    with torch.no_grad():
        for part in (plain.layers[0], *([] if way == "stage 0" else [plain.head])):
            next(part.parameters()).mul_(2)
    assert_full(comm, model, plain)
    torch.testing.assert_close(model(floats(0, 5)), plain(floats(0, 5)))


@pytest.mark.parametrize("way", ["stage 3", "stage 3, private"])
def test_functional_calls(comm: Communicator, way: str) -> None:
    """Of a model of which each rank has the whole; of shards they are an error that says so."""
    model, plain = shard(Model(), comm, way), Model()
    x = floats(0, 5)

    def gradients(called: nn.Module) -> dict[str, torch.Tensor]:
        params = {name: param.detach() for name, param in called.named_parameters()}
        return torch.func.grad(lambda values: torch.func.functional_call(called, values, (x,)).sum())(params)

    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"^torch\.func\.functional_call has put .* place of parameter \S+, .* write=True"
        ):
            gradients(model)
        with unshard(model, write=True):
            torch.testing.assert_close(gradients(model), gradients(plain))
        torch.testing.assert_close(model(x), plain(x))
