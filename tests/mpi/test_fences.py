"""No rank reads a parameter while another one writes it, however slow some are: see [Note: fences] in mpitrain/sharding/context.py."""

import random
import time
from pathlib import Path

import torch
from torch import nn

import mpitrain
from collectives import Communicator
from mpitrain.sharding import clip_grad_norm_, fully_shard, unshard

STEPS = 6


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
        x = torch.randn(12, 17, generator=torch.Generator().manual_seed(step))
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


def test_slow_ranks_change_nothing(comm: Communicator, shared_tmp: Path, tmp_path: Path) -> None:
    rng = random.Random(comm.rank)
    model, plain = model_of(rng), model_of(random.Random(0))
    for module in plain.modules():
        if isinstance(module, Slow):
            module.pause = lambda: None  # type: ignore[method-assign]
    fully_shard(model, comm, storage="resident")
    rows = slice(12 // comm.size * comm.rank, 12 // comm.size * (comm.rank + 1))
    got = run(model, comm, rows, shared_tmp, Slow(rng).pause, clip_grad_norm_)
    expected = run(plain, comm, slice(None), tmp_path / "plain", lambda: None, clip_grad_norm_)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-3, atol=1e-4)
    assert all(values == got for values in comm.all_gather_object(got)), "the ranks saw different parameters"
