"""Complex parameters, sharded: the same values as the plain model's, in training and in every file they go to."""

from pathlib import Path

import pytest
import torch
from sharded_models import assert_same, loss_of, mine, pair_of
from torch import nn
from ways import WAYS, spread

import ckpt
import mpitrain
from collectives import Communicator
from mpitrain.placement.fills import Constant, Normal
from mpitrain.sharding import EMA, GradScaler, MixedPrecisionPolicy, fully_shard, sync_buffers
from mpitrain.sharding.unit.layout import rows_of

pytestmark = pytest.mark.ranks(1, 2, 3)

# As in test_parity.py, relative to the largest element, of which a complex number's smaller part has the rounding.
TOLERANCE = {"rtol": 1e-3, "atol": 1e-4}


class Spectral(nn.Module):
    """A layer in the frequency domain, of sizes that no number of ranks divides, between two of real numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        self.phase = nn.Parameter(torch.randn((), dtype=torch.complex64))
        self.wide = nn.Parameter(torch.randn(7, 3, dtype=torch.complex128))
        self.last = nn.Linear(6, 3)
        self.register_buffer("shift", torch.full((4,), 0.5 + 1j))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        spectrum = torch.fft.rfft(x.float()) @ self.weight * self.phase + self.shift
        x = x + torch.fft.irfft(spectrum, n=6) * (self.wide.sum(0) * 1j).abs().square().mean().float()
        return self.last(x.to(self.last.weight.dtype))


@pytest.mark.parametrize("way", [way for (way,) in spread(WAYS)])
def test_training(comm: Communicator, way: str) -> None:
    model, plain = pair_of(Spectral, comm, way)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain)]
    for step in range(4):
        with model.no_sync():
            loss_of(model, 100 + step, mine(comm)).backward()
        loss_of(plain, 100 + step).backward()
        loss_of(model, step, mine(comm)).backward()
        loss_of(plain, step).backward()
        assert_same(model, plain, grads=True, **TOLERANCE)
        norm = mpitrain.clip_grad_norm_(model, 0.5)
        want = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        torch.testing.assert_close(norm, want.double(), rtol=1e-4, atol=1e-6)
        assert_same(model, plain, grads=True, **TOLERANCE)
        for each in optimizers:
            each.step()
            each.zero_grad()
    assert_same(model, plain, grads=False, **TOLERANCE)


def test_in_a_checkpoint_in_full_and_in_weights(comm: Communicator, shared_tmp: Path) -> None:
    model, plain = pair_of(Spectral, comm, "stage 3")
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain)]
    ema = EMA(model, 0.5)
    scaler = GradScaler(model, scale=4.0)
    scaler.scale(loss_of(model, 0, mine(comm))).backward()
    loss_of(plain, 0).backward()
    assert scaler.step(optimizers[0])
    optimizers[1].step()
    ema.update()
    sync_buffers(model)
    mpitrain.save(shared_tmp / "saved", model, optimizers[0], ema=ema)
    assert str(ckpt.open(shared_tmp / "saved")["model/weight"].dtype) == "complex64"

    with mpitrain.unshard(model):
        for name, full in model.named_parameters():
            torch.testing.assert_close(full.detach(), plain.get_parameter(name).detach(), rtol=1e-3, atol=1e-4)
    whole = mpitrain.full_state_dict(model)
    if comm.rank == 0:
        assert whole.keys() == plain.state_dict().keys()
        assert all(whole[name].dtype == value.dtype for name, value in plain.state_dict().items())

    alone = comm.split(comm.rank)  # another number of ranks
    torch.manual_seed(1)
    other = fully_shard(Spectral(), alone, storage="private")
    its = torch.optim.AdamW(other.parameters(), lr=1.0)
    its_ema = EMA(other, 0.5)
    mpitrain.load(shared_tmp / "saved", other, its, ema=its_ema)
    for each in (other, plain):
        each.zero_grad()
        loss_of(each, 1).backward()
    its.step()
    optimizers[1].step()
    assert_same(other, plain, grads=False, **TOLERANCE)
    assert all(value.dtype == other.get_parameter(name).dtype for name, value in its_ema.tensors.items())

    mpitrain.load_full_state_dict(other, whole if comm.rank == 0 else mpitrain.full_state_dict(other))
    alone.free()


def test_mixed_precision_leaves_them_as_they_are(comm: Communicator) -> None:
    model, plain = pair_of(
        Spectral, comm, "stage 3, private", mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    )
    loss_of(model, 0, mine(comm)).backward()
    loss_of(plain, 0).backward()
    for name in ("weight", "phase", "wide"):
        shard, full = model.get_parameter(name), plain.get_parameter(name)
        assert shard.grad is not None and shard.grad.dtype == full.dtype
        # bf16, in the layers around, carries 8 bits.
        torch.testing.assert_close(shard.grad, rows_of(full.grad, shard.shard_box), rtol=0.1, atol=0.05)


def test_initial_values_do_not_depend_on_the_number_of_ranks(comm: Communicator) -> None:
    model, plain = pair_of(Spectral, comm, "stage 3")
    for each in (model, plain):
        mpitrain.initialize(each, lambda name: Constant(2.0) if name == "wide" else Normal(1.0))
    assert plain.weight.imag.abs().min() > 0 and plain.phase.imag != 0
    assert torch.equal(plain.wide, torch.full_like(plain.wide, 2))
    for shard, full in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(shard, rows_of(full, shard.shard_box))


class Conjugated(nn.Module):
    """A parameter and a buffer that torch keeps as conjugates of other memory; the gradient of `weight` comes as one, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        self.other = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64).conj())
        self.register_buffer("shift", torch.full((4,), 0.5 + 1j).conj())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x.to(torch.complex64) @ self.other + self.shift) @ self.weight.conj()).abs()


def test_conjugates(comm: Communicator) -> None:
    model, plain = pair_of(Conjugated, comm)
    x = torch.ones(2, 4)
    sync_buffers(model)
    for each in (model, plain):
        each(x).sum().backward()
        for param in each.parameters():
            param.grad = param.grad.resolve_conj() if each is plain else param.grad
    assert_same(model, plain, grads=True, **TOLERANCE)
    for order in (2.0, float("inf")):  # torch's, of gradients that are all complex
        norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.5, order) for each in (model, plain)]
        torch.testing.assert_close(*norms, rtol=1e-4, atol=1e-6)
    mpitrain.clip_grad_norm_(model, 0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    assert GradScaler(model, scale=1.0).step(optimizer)
    assert model.shift.allclose(plain.shift)
