"""Shards in other memory than full parameters. On CPUs both are host memory, but all copies between them are made."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from ways import WAYS, options_of, spread

import mpitrain
from collectives import Communicator
from mpitrain.sharding import fully_shard
from mpitrain.sharding.unit.layout import rows_of


class Parted(mpitrain.CPUOffloadPolicy):
    """As if the CPU's memory were a GPU's: what the tests of CPUs can prove."""

    def parts(self, device: torch.device) -> bool:
        return True


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(11, 11), nn.Tanh()) for _ in range(3)), nn.Linear(11, 3))


def train(model: nn.Module, comm: Communicator, *, accumulate: int, rows: slice) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
    for step in range(4):
        for micro in range(accumulate):
            x = torch.randn(12, 11, generator=torch.Generator().manual_seed(10 * step + micro))
            (model(x[rows]).square().mean() / accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize(("way", "accumulate"), spread(WAYS, [1, 2]))
def test_the_same_values(comm: Communicator, way: str, accumulate: int) -> None:
    options = options_of(comm, way)
    mesh = options.pop("mesh", comm)
    model, plain = model_of(), model_of()
    fully_shard(model, mesh, offload_policy=Parted(), **options)
    rows = slice(12 // comm.size * comm.rank, 12 // comm.size * (comm.rank + 1))
    train(model, comm, accumulate=accumulate, rows=rows)
    train(plain, comm, accumulate=accumulate, rows=slice(None))
    reference = dict(plain.named_parameters())
    for name, shard in model.named_parameters():
        torch.testing.assert_close(
            shard.detach(), rows_of(reference[name].detach(), shard.shard_box), rtol=1e-4, atol=1e-5
        )
    x = torch.ones(2, 11)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)


def test_shards_lie_apart_and_go_into_checkpoints(comm: Communicator, shared_tmp: Any) -> None:
    model = fully_shard(model_of(), comm, stage=2, storage="private", offload_policy=Parted())
    optimizer = train(model, comm, accumulate=1, rows=slice(comm.rank, comm.rank + 1))
    for unit in (unit for state in [model._sharding] for unit in state.units):
        begin, end = unit.storage.flat.data_ptr(), unit.storage.flat.data_ptr() + unit.storage.nbytes
        assert not any(begin <= param.shard.data_ptr() < end for param in unit.params if param.shard.numel())
    kept = [param.detach().clone() for param in model.parameters()]
    mpitrain.save(shared_tmp / "offloaded", model, optimizer)
    train(model, comm, accumulate=1, rows=slice(comm.rank, comm.rank + 1))
    mpitrain.load(shared_tmp / "offloaded", model, optimizer)
    assert all(torch.equal(param, value) for param, value in zip(model.parameters(), kept, strict=True))


def test_on_cpus_it_changes_nothing(comm: Communicator) -> None:
    model = fully_shard(model_of(), comm, offload_policy=mpitrain.CPUOffloadPolicy())
    assert all(unit.storage.in_place for unit in model._sharding.units if unit.storage.lasts)
    with pytest.raises(ValueError, match="offload_policy"):
        fully_shard(model_of(), comm, offload_policy=True)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [2, 3])
def test_on_a_gpu_shards_are_pinned_on_the_host(comm: Communicator, stage: int) -> None:
    device = torch.device("cuda", comm.node.rank % torch.cuda.device_count())
    model, plain = model_of().to(device), model_of()
    reference = copy.deepcopy(plain)
    fully_shard(model, comm, stage=stage, offload_policy=mpitrain.CPUOffloadPolicy())
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=0.02, fused=True) for m in (model, reference))
    for step in range(4):
        x = torch.randn(12, 11, generator=torch.Generator().manual_seed(step))
        model(x.to(device)).square().mean().backward()
        reference(x).square().mean().backward()
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    expected = dict(reference.named_parameters())
    for name, shard in model.named_parameters():
        assert shard.device.type == "cpu"
        assert shard.is_pinned() or not shard.numel()
        torch.testing.assert_close(
            shard.detach(), rows_of(expected[name].detach(), shard.shard_box), rtol=1e-3, atol=1e-4
        )
