"""Methods beside the forward: registered ones compute as plain torch does, and any other use of shards as whole parameters raises."""

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as fn
from sharded_models import BATCH, STORAGES, floats, mine, shard
from torch import nn

import mpitrain
from collectives import Communicator
from mpitrain.sharding import fully_shard
from mpitrain.sharding.module import sharded_modules
from mpitrain.sharding.unit.layout import rows_of

pytestmark = pytest.mark.ranks(2)
WAYS = ["stage 0", "stage 2, private", "stage 3", "stage 3, private"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))

    def half(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x)


class Model(nn.Module):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.stem, self.blocks = nn.Linear(5, 8), nn.ModuleList(Block() for _ in range(3))
        self.scale, self.head = nn.Parameter(torch.tensor(1.5)), nn.Linear(8, 5)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(x))

    def training_step(self, batch: dict[str, torch.Tensor], number: int) -> dict[str, Any]:
        return {"out": self(batch["x"] + self.head.weight.sum() * number), "number": number}

    def pieces(self, x: torch.Tensor) -> Any:
        yield self.stem(x)


USES: dict[str, Callable[[Model, torch.Tensor], torch.Tensor]] = {
    "encode": lambda model, x: model.encode(x),
    "forward": lambda model, x: model.forward(x),
    "training_step": lambda model, x: model.training_step({"x": x}, number=1)["out"],
    "a block's method": lambda model, x: model.blocks[1].half(model.stem(x)),
    "a block": lambda model, x: model.blocks[1](model.stem(x)),
}


@pytest.mark.rest
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("way", WAYS)
def test_registered_methods_train_as_plain_torch_does(comm: Communicator, way: str, use: str) -> None:
    plain = Model()
    model = shard(Model(), comm, way)
    mpitrain.register_forward_method(model, "encode", "training_step")
    mpitrain.register_forward_method(model.blocks[1], "half", "forward")
    mpitrain.register_forward_method(model.stem, "forward")  # a part without a unit of its own
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for step in range(2):
        x = floats(step, 5)
        for m, optimizer, rows in zip((plain, model), optimizers, (slice(None), mine(comm)), strict=True):
            USES[use](m, x[rows]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(USES[use](model, x), USES[use](plain, x), rtol=1e-5, atol=1e-6)


def _weight_of_head(model: Model, x: torch.Tensor) -> None:
    weight = model.head.weight
    fn.linear(x.new_ones(1, weight.shape[1]), weight).sum().backward()


HIDDEN: dict[str, tuple[Callable[[Model, torch.Tensor], Any], str]] = {
    "a layer": (lambda model, x: model.stem(x), "stem (a Linear) was called"),
    "a method": (lambda model, x: model.encode(x), "stem (a Linear) was called"),
    "a block": (lambda model, x: model.blocks[0](model.blocks), "blocks.0 (a Block) was called"),
    "a block's forward": (lambda model, x: model.blocks[0].forward(x), "blocks.0 (a Block) was called"),
    "a layer of a block": (lambda model, x: model.blocks[2].up(x), "blocks.2.up (a Linear) was called"),
    "a backward": (_weight_of_head, "a backward reached a shard: parameter head.weight of head (a Linear)"),
    "a penalty": (lambda model, x: model.blocks[0].up.weight.square().sum().backward(), "blocks.0.up.weight"),
}


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("storage", STORAGES)
def test_other_uses_of_shards_raise_one_error(comm: Communicator, storage: str) -> None:
    plain, model = Model(), Model()
    fully_shard(model, comm, storage=storage)
    x = floats(0, 5)
    for is_trained in (False, True):
        if is_trained:
            model(x).sum().backward()
        grads = [param.grad for param in model.parameters()]
        for name, (use, found) in HIDDEN.items():
            for with_grad in (True, False)[: 1 if "reached" in found or "penalty" in name else 2]:
                with pytest.raises(RuntimeError) as error, torch.set_grad_enabled(with_grad):
                    use(model, x)
                text = str(error.value)
                expected = (found, "of parameter ", "mpitrain.register_forward_method(", "with mpitrain.unshard(model)")
                assert all(part in text for part in expected) and "\n" not in text
        assert all(now is before for now, before in zip((p.grad for p in model.parameters()), grads, strict=True))
    torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("storage", STORAGES)
def test_within_unshard_every_use_is_right(comm: Communicator, storage: str) -> None:
    plain, model = Model(), Model()
    fully_shard(model, comm, storage=storage)
    x = floats(0, 5)
    with mpitrain.unshard(model):
        for _ in range(2):  # the second one after a backward
            for m, rows in ((model, mine(comm)), (plain, slice(None))):
                m.zero_grad()
                (
                    m.encode(x[rows]) + m.blocks[2].up(m.stem(x[rows])) + m.blocks[0](m.stem(x[rows]))
                ).square().mean().backward()
    grads = {name: param.grad for name, param in plain.named_parameters()}
    for param in mpitrain.sharding.sharded_params(model):
        full = grads[param.name]
        expected = None if full is None else rows_of(full, param.box)
        torch.testing.assert_close(param.shard.grad, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-6)


def test_a_program_with_several_roots(comm: Communicator) -> None:
    """The call of a root is a forward. A method of the module around the roots fills the parameters of all of them."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = Model(), Model()

        def codes(self, x: torch.Tensor) -> torch.Tensor:
            return self.one.encode(x) + self.other.encode(x) + self.one(x).sum()

    plain, model = Both(), Both()
    for part in (model.one, model.other):
        fully_shard(part, comm, storage="private")
    mpitrain.register_forward_method(model, "codes")
    x = floats(0, 5)
    for call in (lambda m: m.other(m.one(x)), lambda m: m.codes(x)):
        torch.testing.assert_close(call(model), call(plain), rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match="stem"):
        model.one.encode(x)


def test_a_method_needs_no_more_memory_than_the_forward(comm: Communicator) -> None:
    model = Model()
    fully_shard(model, comm, storage="private")
    mpitrain.register_forward_method(model, "encode")
    flats = [flat for part in sharded_modules(model) for flat in part._unit.flats]
    held: list[int] = []
    for block in model.blocks:
        block.up.register_forward_hook(
            lambda *_: held.append(sum(flat.storage.full_buffer.untyped_storage().nbytes() for flat in flats))
        )
    peaks = []
    for call in (model, model.encode):
        for step in range(2):  # the second one has prefetches, if they overlap
            held.clear()
            call(floats(step, 5)[: BATCH // 2]).sum().backward()
            assert len(held) == 3
        peaks.append(max(held))
        model(floats(0, 5)).sum().backward()
    assert peaks[0] == peaks[1] < sum(flat.storage.nbytes for flat in flats)


def test_in_a_forward_modules_are_as_the_user_made_them(comm: Communicator) -> None:
    """torch's compiler and fast paths see neither hooks nor another forward."""
    seen: list[bool] = []

    class Looks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append("forward" in vars(self) or bool(self._forward_pre_hooks) or type(self) is not Looks)
            return super().forward(x)

    model = nn.Sequential(Looks(5, 5), Looks(5, 5))
    fully_shard(model, comm)
    assert all(type(param) is nn.Parameter for param in model.parameters())
    signature = inspect.signature(model[0].forward)
    x = floats(0, 5)
    model(x).sum().backward()
    assert seen == [False, False] and signature == inspect.signature(Looks(1, 1).forward)
    before = model[0].forward  # a wrapper of a library keeps the forward that it found
    model[0].forward = lambda x: before(x) * 2
    for _ in range(2):
        with mpitrain.unshard(model):
            expected = fn.linear(
                fn.linear(x, model[0].weight, model[0].bias) * 2, model[1].weight, model[1].bias
            ).detach()
        torch.testing.assert_close(model(x), expected)
        with pytest.raises(RuntimeError, match=r"0 \(a Looks\) was called"):
            model[0](x)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("encode", "decode"), "'decode' is no method of it"),
        (("head",), "'head' is a module; register methods of it"),
        (("pieces",), "'pieces' is a generator or a coroutine"),
    ],
)
def test_names_that_are_no_methods(comm: Communicator, names: tuple[str, ...], found: str) -> None:
    for model in (Model(), fully_shard(Model(), comm)):
        with pytest.raises(ValueError, match=f"register_forward_method: .*{found}"):
            mpitrain.register_forward_method(model, *names)
    plain = Model()
    mpitrain.register_forward_method(plain, "encode")
    assert "encode" not in vars(plain)


def test_parts_of_a_sharded_model_are_not_copied(comm: Communicator) -> None:
    model = fully_shard(Model(), comm)
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(model.stem)
    with mpitrain.unshard(model):
        torch.testing.assert_close(copy.deepcopy(model.stem).weight, Model().stem.weight)


@pytest.mark.parametrize("way", WAYS)
def test_a_registered_method_takes_no_steps(comm: Communicator, way: str) -> None:
    """As Lightning's manual optimization does: without registration it works, because it calls the model."""
    plain, model, wrong = Model(), shard(Model(), comm, way), shard(Model(), comm, way)

    def take_steps(m: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        for _ in range(2):
            m(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    for m in (plain, model, wrong):
        m.steps = functools.partial(take_steps, m, torch.optim.SGD(m.parameters(), lr=0.1))  # type: ignore[assignment]
    mpitrain.register_forward_method(wrong, "steps")
    with pytest.raises(RuntimeError, match=r"SGD\.step within a forward or a registered method of the model") as error:
        wrong.steps(floats(0, 5))  # type: ignore[operator]
    assert "Register only methods that compute" in str(error.value)
    for m in (plain, model):
        m.steps(floats(0, 5))  # type: ignore[operator]
    torch.testing.assert_close(model(floats(1, 5)), plain(floats(1, 5)))
