"""Shards in other memory than full parameters. On CPUs both are host memory, but all copies between them are made."""

import copy
from typing import Any

import pytest
import torch
from sharded_models import Parted, assert_same, floats, loss_of, mine, pair_of
from torch import nn
from ways import WAYS, spread

import mpitrain
from collectives import Communicator
from mpitrain.sharding import fully_shard

# four ranks make copies of shards, and three show no more than two
pytestmark = pytest.mark.ranks(1, 2, 4)


def model_of() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(11, 11), nn.Tanh()) for _ in range(3)), nn.Linear(11, 3))


def train(model: nn.Module, *, accumulate: int, rows: slice) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
    for step in range(4):
        for micro in range(accumulate):
            (loss_of(model, 10 * step + micro, rows, width=11) / accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@pytest.mark.rest
@pytest.mark.parametrize(("way", "accumulate"), spread(WAYS, [1, 2]))
def test_the_same_values(comm: Communicator, way: str, accumulate: int) -> None:
    model, plain = pair_of(model_of, comm, way, offload_policy=Parted())
    train(model, accumulate=accumulate, rows=mine(comm))
    train(plain, accumulate=accumulate, rows=slice(None))
    assert_same(model, plain, grads=False, rtol=1e-4, atol=1e-5)
    x = torch.ones(2, 11)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)


def test_shards_lie_apart_and_go_into_checkpoints(comm: Communicator, shared_tmp: Any) -> None:
    model = fully_shard(model_of(), comm, stage=2, storage="private", offload_policy=Parted())
    optimizer = train(model, accumulate=1, rows=slice(comm.rank, comm.rank + 1))
    for unit in model._unit.flats:
        begin, end = unit.storage.full_buffer.data_ptr(), unit.storage.full_buffer.data_ptr() + unit.storage.nbytes
        assert not any(begin <= param.shard.data_ptr() < end for param in unit.params if param.shard.numel())
    kept = [param.detach().clone() for param in model.parameters()]
    mpitrain.save(shared_tmp / "offloaded", model, optimizer)
    train(model, accumulate=1, rows=slice(comm.rank, comm.rank + 1))
    mpitrain.load(shared_tmp / "offloaded", model, optimizer)
    assert all(torch.equal(param, value) for param, value in zip(model.parameters(), kept, strict=True))


def test_on_cpus_it_changes_nothing(comm: Communicator) -> None:
    model = fully_shard(model_of(), comm, offload_policy=mpitrain.CPUOffloadPolicy())
    assert all(unit.storage.in_place for unit in model._unit.flats if unit.storage.lasts)
    with pytest.raises(ValueError, match="offload_policy"):
        fully_shard(model_of(), comm, offload_policy=True)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [2, 3])
def test_on_a_gpu_shards_are_pinned_on_the_host(comm: Communicator, stage: int) -> None:
    device = torch.device("cuda", comm.node.rank % torch.cuda.device_count())
    torch.manual_seed(0)
    plain = model_of()
    model = copy.deepcopy(plain).to(device)
    fully_shard(model, comm, stage=stage, offload_policy=mpitrain.CPUOffloadPolicy())
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=0.02, fused=True) for m in (model, plain))
    for step in range(4):
        x = floats(step, 11)
        model(x.to(device)).square().mean().backward()
        plain(x).square().mean().backward()
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    for shard in model.parameters():
        assert shard.device.type == "cpu"
        assert shard.is_pinned() or not shard.numel()
    assert_same(model, plain, grads=False, rtol=1e-3, atol=1e-4)
