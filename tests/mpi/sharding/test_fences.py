"""No rank reads a parameter while another one writes it, however slow some are: see [Note: fences] in sharding/step/changes.py."""

import copy
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from extent import extent
from sharded_models import floats, mine
from torch import nn

import mpitrain
from collectives import Communicator
from mpitrain.sharding import clip_grad_norm_, fully_shard, unshard
from mpitrain.sharding.module import units_of

STEPS = 6
RESIDENT, KEPT = {"storage": "resident"}, {"stage": 2, "storage": "private"}


class Slow(nn.Module):
    """Waits at random on some ranks, in forward and in backward."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.pause()
        if x.requires_grad:
            x.register_hook(lambda grad: self.pause())
        return x

    def pause(self) -> None:
        if self.rng.random() < 0.5:
            time.sleep(0.02 * self.rng.random())


def model_of(rng: random.Random) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(Slow(rng), nn.Linear(17, 17), nn.Tanh(), Slow(rng), nn.Linear(17, 17)) for _ in range(3))
    )


def run(model: nn.Module, comm: Communicator, rows: slice, folder: Path, pause, clip) -> list[float]:
    """Training, evaluation, an average of the weights, a save and a load: all that reads or writes parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    average = [param.detach().clone() for param in model.parameters()]
    seen = []
    for step in range(STEPS):
        x = floats(step, 17)
        model(x[rows]).square().mean().backward()
        pause()
        clip(model, 0.5)
        optimizer.step()
        pause()
        optimizer.zero_grad()
        with torch.no_grad():
            for mean, param in zip(average, model.parameters(), strict=True):
                mean.lerp_(param, 0.1)
            pause()
            seen.append(model(x).square().mean().item())
            kept = [param.detach().clone() for param in model.parameters()]
            for param, mean in zip(model.parameters(), average, strict=True):
                param.copy_(mean)  # evaluates the average
            pause()
            seen.append(model(x).square().mean().item())
            for param, value in zip(model.parameters(), kept, strict=True):
                param.copy_(value)
        pause()
        if step == 2:
            mpitrain.save(folder / "checkpoint", model, optimizer)
        if step == 4:
            mpitrain.load(folder / "checkpoint", model, optimizer)
            pause()
            with unshard(model):
                seen.append(sum(param.detach().double().sum().item() for param in model.parameters()))
            pause()
    return seen


def behind(model: Any) -> int:
    """How many units are being refreshed still when the first module runs, in a forward that changes nothing."""
    counts: list[int] = []
    units = units_of(model)
    handle = model[0][0].register_forward_hook(lambda *_: counts.append(sum(unit.is_under_way for unit in units)))
    with torch.no_grad():
        model(torch.zeros(1, 17))
    handle.remove()
    assert not any(unit.is_under_way for unit in units)
    return counts[0] + 1  # the one of this module was waited for


@pytest.mark.rest
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("nodes", "options"),
    extent(
        [("comm", RESIDENT), ("two_nodes", KEPT), ("two_nodes_flying", RESIDENT)],
        [(nodes, options) for nodes in ("comm", "two_nodes", "two_nodes_flying") for options in (RESIDENT, KEPT)],
    ),
)
def test_slow_ranks_change_nothing(
    nodes: str, options: dict[str, Any], shared_tmp: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """On the nodes there are, on two, and on two where full parameters are refreshed behind the forward."""
    if nodes != "comm" and request.getfixturevalue("comm").num_nodes > 1:
        pytest.skip("the ranks of what would seem a node share no memory")
    comm: Communicator = request.getfixturevalue(nodes)
    rng = random.Random(comm.rank)
    model, plain = model_of(rng), model_of(random.Random(0))
    for module in plain.modules():
        if isinstance(module, Slow):
            module.pause = lambda: None  # type: ignore[method-assign]
    fully_shard(model, comm, **options)
    got = run(model, comm, mine(comm), shared_tmp, Slow(rng).pause, clip_grad_norm_)
    expected = run(plain, comm, slice(None), tmp_path / "plain", lambda: None, clip_grad_norm_)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-3, atol=1e-4)
    if comm.has_progress_thread and comm.num_nodes > 1:
        assert behind(model) >= 3, "the blocks are waited for when they run"
    assert all(values == got for values in comm.all_gather_object(got)), "the ranks saw different parameters"


@pytest.mark.one_node
def test_parameters_that_other_modules_use(two_nodes_flying: Communicator) -> None:
    """A block that never runs, whose weight its parent uses, and an exception, while refreshes are under way."""

    class Borrower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.lender, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)
            self.fails = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = nn.functional.linear(self.first(x), self.lender.weight, self.lender.bias)
            if self.fails:
                raise ArithmeticError
            return self.last(x)

    comm = two_nodes_flying
    torch.manual_seed(0)
    model = Borrower()
    plain = copy.deepcopy(model)
    for part in (model.first, model.lender, model.last):
        fully_shard(part, comm, storage="resident")
    fully_shard(model, comm, storage="resident")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for seed in range(5):
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed))
        if seed == 3:
            model.fails = True
            with pytest.raises(ArithmeticError):
                model(x)
            model.fails = False
        losses = [m(x).square().mean() for m in (model, plain)]
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def two_linears(comm: Communicator) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9))
    fully_shard(model, comm, storage="resident")
    return model


WRITERS = {
    "parameters asked for": lambda model, _: [param.mul_(2) for param in model.parameters()],
    "optimizer": lambda model, optimizer: optimizer.step(),
    "state dict": lambda model, _: [value.mul_(2) for value in model.state_dict().values()],
}


@pytest.mark.rest
@pytest.mark.ranks(2)
@pytest.mark.one_node
@pytest.mark.parametrize("writer", WRITERS)
def test_a_rank_writes_when_the_others_have_read(comm: Communicator, writer: str) -> None:
    """After a forward that has no backward, on all ranks but one that is late in that forward."""
    model = two_linears(comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.ones(1, 9)
    model(x).sum().backward()
    rng = random.Random(1)
    with torch.no_grad():
        expected = model(x)
    late = model[1].register_forward_pre_hook(lambda *_: time.sleep(0.1 * (comm.rank == 0)))
    for _ in range(3):
        got = model(x).detach()
        with torch.no_grad():
            WRITERS[writer](model, optimizer)
        assert torch.equal(got, expected)
        with torch.no_grad():
            expected = model(x)
        time.sleep(0.01 * rng.random())
    late.remove()


@pytest.mark.ranks(2, 3, 4)  # one rank waits for nobody
@pytest.mark.one_node
def test_an_average_is_swapped_in_when_the_others_have_read(comm: Communicator) -> None:
    model = two_linears(comm)
    average = mpitrain.EMA(model, 0.5)
    for tensor in average.tensors.values():
        tensor.zero_()
    x = torch.ones(1, 9)
    with torch.no_grad():
        expected = model(x)
    late = model[1].register_forward_pre_hook(lambda *_: time.sleep(0.2 * (comm.rank == 0)))
    got = model(x).detach()
    with average.swapped():
        late.remove()
        assert torch.equal(got, expected)
        with torch.no_grad():
            assert not model(x).any()
    with torch.no_grad():
        assert torch.equal(model(x), expected)


@pytest.mark.one_node
def test_writing_to_kept_parameters_before_the_backward_is_an_error(comm: Communicator) -> None:
    """Where no rank could know that the others are still reading."""
    if comm.size == 1:
        pytest.skip("nobody else reads")
    model = two_linears(comm)
    kept = list(model.parameters())
    x = torch.ones(1, 9)
    for go_on in (lambda loss: loss.backward(), lambda loss: model(x)):
        loss = model(x).sum()
        with torch.no_grad():
            for param in kept:
                param.mul_(1.0)
        with pytest.raises(RuntimeError, match="parameters were written between a forward"):
            go_on(loss)
        comm.barrier()
    model(x).sum().backward()  # and on it goes
    assert all(param.grad is not None for param in kept)
