"""Parameters and buffers without elements, and buffers that are views: they train, and come back by every way, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
import mpitrain
from collectives import Communicator

SHAPES = [(0,), (0, 4), (3, 0), (0, 2, 5), (2, 0, 5)]
VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "negated": lambda: torch.polar(torch.ones(3), torch.arange(3.0)).conj().imag,
    "negated_whole": lambda: torch._neg_view(torch.arange(4.0)),
    "expanded": lambda: torch.full((1,), 2.0).expand(4),
    "expanded_number": lambda: torch.tensor(7).expand(2, 3),
    "turned": lambda: torch.arange(6.0).to(torch.bfloat16).reshape(2, 3).T,
    "every_second": lambda: torch.arange(8.0)[::2],
    "number": lambda: torch.tensor(5),
}
COMPLEX: dict[str, Callable[[], torch.Tensor]] = {
    "conjugated": lambda: torch.polar(torch.ones(3), torch.arange(3.0)).conj(),
    "conjugated_turned": lambda: torch.complex(torch.arange(6.0).view(2, 3), torch.ones(2, 3)).T.conj(),
    "conjugated_number": lambda: torch.tensor(1 + 2j).conj(),
    "conjugated_expanded": lambda: torch.tensor([1 + 2j]).conj().expand(4),
}


class Nothing(nn.Module):
    """All of whose parameters have no elements: a unit without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, 3, dtype=torch.float64))

    def forward(self) -> torch.Tensor:
        return (self.weight * 3).sum().float()


class Odd(nn.Module):
    def __init__(self, *, with_complex: bool) -> None:
        super().__init__()
        self.lin, self.nothing = nn.Linear(4, 4), Nothing()
        self.empty = nn.ParameterList(nn.Parameter(torch.empty(shape)) for shape in SHAPES)
        self.frozen = nn.ParameterList(nn.Parameter(torch.empty(shape), requires_grad=False) for shape in SHAPES)
        for number, shape in enumerate(SHAPES):
            self.register_buffer(f"empty{number}", torch.empty(shape))
        for name, made in (VIEWS | COMPLEX if with_complex else VIEWS).items():
            self.register_buffer(name, made())
        self.register_buffer("tied", self.expanded)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x).square().sum() + sum((p * 2).sum() for p in self.empty) + self.nothing()


def sharded(comm: Communicator, options: dict[str, Any], *, with_complex: bool = True, seed: int = 0) -> Odd:
    torch.manual_seed(seed)
    model = Odd(with_complex=with_complex)
    with torch.no_grad():
        for buffer in model.buffers() if seed else ():  # other values; expanded ones stay
            if buffer.numel() and 0 not in buffer.stride():
                buffer.zero_()
    mpitrain.fully_shard(model.nothing, comm, **options)
    return mpitrain.fully_shard(model, comm, **options)


def assert_same(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    for name, value in model.state_dict().items():
        expected = values[name].resolve_conj().resolve_neg()
        assert value.shape == expected.shape and torch.equal(value.resolve_conj().resolve_neg(), expected), name


@pytest.mark.rest
@pytest.mark.parametrize(
    "options", [{}, {"storage": "private"}, {"stage": 0}, {"stage": 2}, {"cut": "parameters"}, {"slices": 2}], ids=str
)
@pytest.mark.ranks(1, 2, 3)
def test_they_train_and_come_back(comm: Communicator, shared_tmp: Path, options: dict[str, Any]) -> None:
    if comm.size != 2 and options not in ({}, {"storage": "private"}):
        pytest.skip("one number of ranks shows it")
    model = sharded(comm, options)
    optimizer, ema = mpitrain.optim.AdamW(model.parameters(), lr=0.1), mpitrain.EMA(model, 0.5)
    for _ in range(2):
        for _ in mpitrain.rounds(model) if "slices" in options else range(1):
            model(torch.ones(2, 4)).backward()
        mpitrain.clip_grad_norm_(model, 1.0)
        optimizer.step()
        ema.update()
    assert [tuple(param.shape) for param in model.empty] == SHAPES
    full = comm.broadcast_object(mpitrain.full_state_dict(model))
    plain = Odd(with_complex=True)
    assert {name: value.shape for name, value in full.items()} == {n: v.shape for n, v in plain.state_dict().items()}
    assert_same(model, {**full, **dict(model.named_parameters())})
    for name, value in plain.named_buffers(remove_duplicate=False):
        assert torch.equal(full[name], value.resolve_conj()), name

    mpitrain.save(shared_tmp / "there", model, optimizer, ema=ema, background=True)
    ckpt.wait()
    other = sharded(comm, options, seed=1)
    its_optimizer, its_ema = mpitrain.optim.AdamW(other.parameters(), lr=0.1), mpitrain.EMA(other, 0.5)
    mpitrain.load(shared_tmp / "there", other, its_optimizer, ema=its_ema)
    assert_same(other, dict(model.state_dict()))
    assert other.tied is other.expanded, "a buffer with two names stays one"
    for mine, loaded in zip(model.parameters(), other.parameters(), strict=True):
        assert all(torch.equal(value, its_optimizer.state[loaded][key]) for key, value in optimizer.state[mine].items())
    assert all(torch.equal(value, its_ema.tensors[name]) for name, value in ema.tensors.items())

    filled = sharded(comm, options, seed=2)
    mpitrain.load_full_state_dict(filled, full if comm.rank == 0 else {})
    assert_same(filled, dict(model.state_dict()))
    for load in (
        lambda m: mpitrain.load(shared_tmp / "there", m, comm=comm),
        lambda m: mpitrain.load_full_state_dict(m, full),
    ):
        plain = Odd(with_complex=True)
        load(plain)
        assert_same(plain, full)


@pytest.mark.ranks(2)
def test_files_of_weights(comm: Communicator, shared_tmp: Path) -> None:
    """The format has no complex numbers."""
    model = sharded(comm, {}, with_complex=False)
    mpitrain.export_weights(model, shared_tmp / "weights")
    other = sharded(comm, {}, with_complex=False, seed=1)
    assert mpitrain.load_weights(other, shared_tmp / "weights") == ([], [])
    assert_same(other, dict(model.state_dict()))
    plain = Odd(with_complex=False)
    mpitrain.load_weights(plain, shared_tmp / "weights")
    for name, value in model.named_buffers():
        assert torch.equal(plain.get_buffer(name), value), name


@pytest.mark.ranks(2)
def test_a_tensor_of_ones_own_that_cannot_be_filled(comm: Communicator, shared_tmp: Path) -> None:
    model = mpitrain.fully_shard(nn.Linear(4, 4), comm)
    mpitrain.save(shared_tmp / "there", model, tensors={"mine": torch.ones(1).expand(3), "turned": torch.ones(3, 2).T})
    with pytest.raises(ValueError, match=r"tensor 'mine' is expanded or on the meta device"):
        mpitrain.load(shared_tmp / "there", model, tensors={"mine": torch.zeros(1).expand(3)})
    mine = {"mine": torch.zeros(6)[::2], "turned": torch.zeros(3, 2).T}
    mpitrain.load(shared_tmp / "there", model, tensors=mine)
    assert torch.equal(mine["mine"], torch.ones(3)) and torch.equal(mine["turned"], torch.ones(2, 3))
