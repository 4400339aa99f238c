"""Parameters that were frozen when they were sharded, and are trained later: the same values as the plain model's, step by step."""

from pathlib import Path

import pytest
import torch
from sharded_models import assert_same, loss_of, mine, pair_of
from torch import nn
from ways import WAYS, spread

import mpitrain
from collectives import Communicator
from mpitrain.sharding import clip_grad_norm_, fully_shard, sharded_params

pytestmark = pytest.mark.ranks(1, 2)


class Model(nn.Module):
    """Blocks of odd sizes, so that ranks hold unequal parts; `scale` is a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 7)) for _ in range(2)
        )
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(7, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x * self.scale)


def partly_frozen() -> Model:
    model = Model().requires_grad_(False)
    model.blocks[1][0].requires_grad_(True)  # of this block a trained and a frozen unit
    return model


def head(model: Model) -> list[nn.Parameter]:
    return [*model.last.parameters(), model.scale]


def biases(model: Model) -> list[nn.Parameter]:
    return [param for name, param in model.named_parameters() if name.endswith("bias")]


def a_block(model: Model) -> list[nn.Parameter]:
    return [*model.blocks[0].parameters()]


def everything(model: Model) -> list[nn.Parameter]:
    return [*model.parameters()]


STAGES = [
    (head, True),
    (biases, True),
    (a_block, True),
    (head, False),
    (everything, True),
    (biases, False),
    (biases, True),
]


def assert_same_with_gradients(model: nn.Module, plain: nn.Module) -> None:
    """The tolerances are those of test_parity.py."""
    assert_same(model, plain, grads=True, rtol=1e-3, atol=1e-5)
    assert_same(model, plain, grads=False, rtol=1e-3, atol=1e-4)


@pytest.mark.rest
@pytest.mark.parametrize(
    "way", [way for (way,) in spread(way for way in WAYS if way not in ("stage 1", "stage 2, private"))]
)
def test_gradual_unfreezing(comm: Communicator, way: str, shared_tmp: Path) -> None:
    model, plain = pair_of(partly_frozen, comm, way)
    params = list(model.parameters())
    # One optimizer had all parameters from the start, and leaves those without a gradient alone.
    optimizers = [torch.optim.AdamW(each.parameters(), lr=3e-3, eps=1e-4) for each in (model, plain)]
    step = 0

    def train(model: Model, plain: Model, optimizers: list[torch.optim.Optimizer]) -> None:
        nonlocal step
        if step % 3 == 1:  # gradients wait for the next backward
            with model.no_sync():
                loss_of(model, 100 + step, mine(comm)).backward()
            loss_of(plain, 100 + step).backward()
        loss_of(model, step, mine(comm)).backward()
        loss_of(plain, step).backward()
        norm = clip_grad_norm_(model, 0.5)
        torch.testing.assert_close(
            norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.5).double(), rtol=1e-4, atol=1e-6
        )
        assert_same_with_gradients(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1

    train(model, plain, optimizers)
    for choose, flag in STAGES:
        for each in (model, plain):
            for param in choose(each):
                param.requires_grad_(flag)
        train(model, plain, optimizers)
    assert all(a is b for a, b in zip(model.parameters(), params, strict=True)), "the optimizer's parameters"
    assert all(param.full._post_accumulate_grad_hooks for param in sharded_params(model)), "reduced as they come"

    # The state of what was thawed goes into another model, frozen as this one was, on other ranks; which goes on.
    mpitrain.save(shared_tmp / "saved", model, optimizers[0])
    alone = comm.split(comm.rank)
    torch.manual_seed(1)
    other = fully_shard(Model().requires_grad_(False), alone, storage="private")
    its = torch.optim.AdamW(other.parameters(), lr=1.0)
    mpitrain.load(shared_tmp / "saved", other, its)
    other.requires_grad_(True)
    loss_of(other, step).backward()
    loss_of(plain, step).backward()
    clip_grad_norm_(other, 0.5)
    nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    its.step()
    optimizers[1].step()
    assert_same_with_gradients(other, plain)
    del other, its
    alone.free()


@pytest.mark.parametrize("way", ["stage 3", "stage 3, private"])
def test_a_model_that_was_frozen_as_a_whole(comm: Communicator, way: str) -> None:
    model, plain = pair_of(lambda: Model().requires_grad_(False), comm, way)
    assert not loss_of(model, 0, mine(comm)).requires_grad
    head_optimizer, reference = (torch.optim.SGD(head(each), lr=0.1) for each in (model, plain))
    model.requires_grad_(True)
    plain.requires_grad_(True)
    for optimizer, each in ((head_optimizer, model), (reference, plain)):
        optimizer.add_param_group({"params": a_block(each)})
    loss_of(model, 1, mine(comm)).backward()
    loss_of(plain, 1).backward()
    assert_same_with_gradients(model, plain)
    for optimizer in (head_optimizer, reference):
        optimizer.step()
        optimizer.zero_grad()
    model.zero_grad()
    plain.zero_grad()
    assert_same_with_gradients(model, plain)


@pytest.mark.parametrize("way", ["stage 3", "stage 3, private", "stage 1, private"])
def test_what_one_rank_alone_has_thawed_is_an_error_on_all(comm: Communicator, way: str) -> None:
    model, plain = pair_of(partly_frozen, comm, way)
    if comm.rank == comm.size - 1:
        model.blocks[0].requires_grad_(True)
    if comm.size > 1:
        for _ in range(2):
            with pytest.raises(
                RuntimeError, match=rf"blocks\.0\.0\.weight was frozen .* True on rank {comm.size - 1} and False"
            ):
                loss_of(model, 0, mine(comm))
    model.blocks[0].requires_grad_(True)
    plain.blocks[0].requires_grad_(True)
    loss_of(model, 0, mine(comm)).backward()
    loss_of(plain, 0).backward()
    assert_same_with_gradients(model, plain)


@pytest.mark.parametrize("way", ["stage 3", "stage 3, private"])
def test_flags_that_change_while_full_parameters_are_shown(comm: Communicator, way: str) -> None:
    model, plain = pair_of(partly_frozen, comm, way)
    for choose, flag in ((a_block, True), (everything, True), (head, False)):
        with mpitrain.unshard(model):
            for each in (model, plain):
                for param in choose(each):
                    param.requires_grad_(flag)
        assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in plain.parameters()]
        for each in (model, plain):
            each.zero_grad()
        loss_of(model, 0, mine(comm)).backward()
        loss_of(plain, 0).backward()
        assert_same_with_gradients(model, plain)
