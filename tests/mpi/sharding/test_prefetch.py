"""Gathers begun ahead of their use: in which order, how many bytes, and that they change no bit of what is computed."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sharded_models import assert_same, loss_of, mine, pair_of, shard
from torch import nn

from collectives import Communicator
from collectives.progress.deferred import Deferred
from collectives.progress.on_thread import Thread
from mpitrain.sharding import MixedPrecisionPolicy, unshard
from mpitrain.sharding.module import units_of
from mpitrain.sharding.unit.storage import Gathered

# each rank begins the same gathers in the same order: three ranks show as much as four
pytestmark = pytest.mark.ranks(1, 2, 3)

WIDTHS = [9, 12, 7, 15]


@pytest.fixture(scope="module")
def flying(comm: Communicator) -> Communicator:
    """All ranks, with a progress thread."""
    return Communicator(comm.mpi.Dup(), progress=Thread())


class Tower(nn.Module):
    """Blocks of different sizes, run in the order of `order`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 6)) for width in WIDTHS
        )
        self.order = list(range(len(WIDTHS)))
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number in self.order:
            x = x + self.blocks[number](x)
            if self.fails:
                raise ArithmeticError("in the middle")
        return x


def sharded(comm: Communicator, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Tower()
    return shard(model, comm, blocks=model.blocks, storage="private", **options)


def storages(model: Any) -> list[Any]:
    return [flat.storage for unit in units_of(model) for flat in unit.flats]


def step(model: nn.Module, number: int, optimizer: torch.optim.Optimizer) -> float:
    rank = model._unit.ranks.data_parallel.rank
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * number + rank))
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        return model(x).square().mean().item()


def train(model: nn.Module, steps: int = 4, before: Callable[[int], None] = lambda number: None) -> list[Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for number in range(steps):
        before(number)
        losses.append(step(model, number, optimizer))
    return [losses, *(param.detach().tolist() for param in model.parameters())]


class Log:
    """What is begun and what is used, in order, by the number of bytes, which are different for each unit."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.ahead: dict[Gathered, int] = {}
        self.most = 0

    def begun(self, storage: Gathered) -> None:
        self.events.append(("begun", storage.nbytes))
        self.ahead[storage] = storage.nbytes
        self.most = max(self.most, sum(self.ahead.values()))

    def used(self, storage: Gathered) -> None:
        self.events.append(("ahead" if self.ahead.pop(storage, 0) else "late", storage.nbytes))

    def count(self, what: str) -> int:
        return sum(event == what for event, _ in self.events)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    log = Log()
    begin, fill, free = Gathered.begin_fill, Gathered.fill, Gathered.free

    def begin_fill(self: Gathered, shard: torch.Tensor, *, ahead: bool = True) -> None:
        if ahead:
            log.begun(self)
        begin(self, shard, ahead=ahead)

    def fill_(self: Gathered, shard: torch.Tensor) -> bool:
        done = fill(self, shard)
        if done:
            log.used(self)
        return done

    def free_(self: Gathered, **options: Any) -> None:
        if log.ahead.pop(self, 0):
            log.events.append(("in vain", self.nbytes))
        free(self, **options)

    monkeypatch.setattr(Gathered, "begin_fill", begin_fill)
    monkeypatch.setattr(Gathered, "fill", fill_)
    monkeypatch.setattr(Gathered, "free", free_)
    return log


def several(comm: Communicator) -> None:
    if comm.size == 1:
        pytest.skip("one rank gathers nothing")


@pytest.mark.rest
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("num_units", [1, 2, 10])
def test_order_and_bytes(flying: Communicator, log: Log, num_units: int, reshard_after_forward: bool) -> None:
    """From the second pass on all is begun before it is used, within the limit, and alike on all ranks."""
    several(flying)
    expected = train(sharded(flying, prefetch_bytes=0, reshard_after_forward=reshard_after_forward))
    assert log.count("begun") == 0
    late = log.count("late")
    log.events.clear()
    blocks = sorted(storage.nbytes for storage in storages(sharded_and_run(flying)))[:-1]
    log.events.clear()
    limit = num_units * max(blocks)
    got = train(sharded(flying, prefetch_bytes=limit, reshard_after_forward=reshard_after_forward))
    assert got == expected, "the same bits"
    assert log.most <= limit
    assert log.count("in vain") == 0
    assert log.count("ahead") + log.count("late") == late, "no gather more than without"
    if num_units:
        backward = len(WIDTHS) if reshard_after_forward else 0
        # The first forward and backward are late, and of each forward the outermost module's own, longer than the limit.
        first = 1 + len(WIDTHS) + backward
        assert log.count("late") <= first + 7
        assert log.most > 0
    if num_units >= 2:
        assert log.most > max(blocks)
    assert all(events == log.events for events in flying.all_gather_object(log.events))


def sharded_and_run(comm: Communicator) -> Any:
    model = sharded(comm)
    with torch.no_grad():
        model(torch.zeros(1, 5))
    return model


def test_the_default_is_the_longest_unit_within(flying: Communicator, log: Log) -> None:
    several(flying)
    model = sharded(flying)
    train(model)
    assert 0 < log.most <= max(storage.nbytes for storage in storages(model)[1:])


def test_nothing_is_begun_where_nothing_overlaps(comm: Communicator, log: Log) -> None:
    several(comm)
    still = Communicator(comm.mpi.Dup(), progress=Deferred())
    train(sharded(still))
    assert log.count("begun") == 0
    still.free()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fullorders(flying: Communicator, log: Log, dtype: torch.dtype) -> None:
    """Modules run in another order, or not at all, in some steps, on all ranks alike."""
    several(flying)
    orders = [[0, 1, 2, 3], [0, 1, 2, 3], [0, 2, 1, 3], [3], [3], [3], [1, 1, 0], [1, 1, 0], [1, 1, 0], []]
    results = []
    for limit in (0, 1 << 20):
        model = sharded(flying, prefetch_bytes=limit, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))

        def turn(number: int, model: Any = model) -> None:
            model.order = orders[number]
            if number:
                kept = [storage.full_buffer.untyped_storage().size() for storage in storages(model)]
                assert not any(kept), "what was begun in vain is given back when the pass ends"

        results.append(train(model, len(orders), turn))
    assert results[0] == results[1]
    assert 0 < log.count("in vain") < log.count("ahead")
    assert all(events == log.events for events in flying.all_gather_object(log.events))


def test_after_an_exception(flying: Communicator, log: Log) -> None:
    several(flying)
    plain = train(sharded(flying, prefetch_bytes=0), 5)
    model = sharded(flying, prefetch_bytes=1 << 20)

    def fail(number: int) -> None:
        model.fails = True
        if number > 1:
            with pytest.raises(ArithmeticError):
                model(torch.zeros(2, 5))
            assert not any(storage.is_under_way for storage in storages(model))
            assert not any(storage.full_buffer.untyped_storage().size() for storage in storages(model))
        model.fails = False

    assert train(model, 5, fail) == plain


def test_full_parameters_outside_of_forward(flying: Communicator) -> None:
    several(flying)
    model, plain = sharded(flying), sharded(flying, prefetch_bytes=0)
    for m in (model, plain):
        train(m)
    with unshard(model), unshard(plain):
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one, other)
    assert not any(storage.full_buffer.untyped_storage().size() for storage in storages(model))


@pytest.mark.rest
def test_a_model_that_goes_while_it_is_gathered(flying: Communicator) -> None:
    """The progress thread writes into memory that is still there."""
    several(flying)
    for _ in range(8 if flying.size == 2 else 3):
        model = sharded(flying)
        train(model, 1)
        for unit in units_of(model):
            unit.begin_unshard()
        del model, unit
        gc.collect()
        garbage = [torch.full((200,), 3.0) for _ in range(50)]
        flying.barrier()
        assert all((each == 3).all() for each in garbage)


def test_a_plain_copy_computes_the_same(flying: Communicator) -> None:
    model, plain = pair_of(Tower, flying, None, lambda model: model.blocks, storage="private")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, plain)]
    for number in range(4):
        losses = loss_of(model, number, mine(flying)), loss_of(plain, number)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, plain, grads=False, rtol=1e-3, atol=1e-4)
    with unshard(model):
        for one, full in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.detach(), full.detach(), rtol=1e-3, atol=1e-4)
