"""Buffers that differ between ranks: all files have those of data rank 0, and checked mode names them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ckpt
import mpitrain
from collectives import Communicator
from mpitrain.models import GPT, GPTConfig
from mpitrain.stages import pipeline
from mpitrain.weights import state as weights


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), nn.BatchNorm1d(2))


def with_buffers() -> GPT:
    """A model for all kinds of parallelism, with two buffers in each block: a vector, and a number."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=20, context=4, width=8, layers=2, heads=2, tied=False))
    for block in model.blocks:
        block.register_buffer("mean", torch.zeros(4))
        block.register_buffer("count", torch.tensor(0))
    return model


def mark(model: nn.Module, rank: int) -> None:
    """Give this rank's buffers values that no other rank has."""
    for value in model.buffers():
        value.fill_(rank + 1)


def values_of(state: Any, names: list[str]) -> dict[str, set[float]]:
    return {name: set(np.asarray(state[name]).reshape(-1).tolist()) for name in names}


def saved_everywhere(model: nn.Module, folder: Path, ranks: Communicator, **more: Any) -> list[Any]:
    """The model's tensors as each way of saving has them, on rank 0."""
    ema = mpitrain.EMA(model, 0.5)
    mpitrain.save(folder / "c", model, ema=ema, **more)
    with ema.swapped():
        mpitrain.save(folder / "average", model, **more)
    found = []
    if "comm" not in more:
        full = mpitrain.full_state_dict(model)
        mpitrain.export_weights(model, folder / "out.safetensors")
        found = [full, load_file(folder / "out.safetensors")] if ranks.rank == 0 else []
    ranks.barrier()
    for name in ("c", "average"):
        opened = ckpt.open(folder / name)
        found.append({key.removeprefix("model/"): opened[key][...] for key in opened if key.startswith("model/")})
    return found if ranks.rank == 0 else []


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("way", ["stage 3", "stage 0", "plain"])
def test_all_buffers_are_those_of_rank_0(comm: Communicator, shared_tmp: Path, way: str) -> None:
    model = normed()
    if way != "plain":
        mpitrain.fully_shard(model, comm, stage=int(way[-1]))
    torch.manual_seed(comm.rank)
    for _ in range(2):
        model(torch.randn(8, 4)).sum().backward()
    expected = {name: value.numpy().copy() for name, value in model.named_buffers()}
    for found in saved_everywhere(model, shared_tmp, comm, **({"comm": comm} if way == "plain" else {})):
        for name, value in expected.items():
            np.testing.assert_array_equal(np.asarray(found[name]), value, name)
    mpitrain.load(shared_tmp / "c", model, **({"comm": comm} if way == "plain" else {}))
    for name, value in comm.broadcast_object(expected).items():
        np.testing.assert_array_equal(model.get_buffer(name).numpy(), value, name)


@pytest.mark.ranks(2)
def test_ignored_parameters_are_those_of_rank_0(comm: Communicator, shared_tmp: Path) -> None:
    """Nothing keeps them the same on the ranks, nor their state in the optimizer."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 40))
    mpitrain.fully_shard(model, comm, ignored_params=[model[1].weight])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(comm.rank)
    model(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()
    ignored = {key: value.tolist() for key, value in optimizer.state[model[1].weight].items() if key != "step"}
    expected = comm.all_gather_object({"1.weight": model[1].weight.tolist(), **ignored})[0]
    found = saved_everywhere(model, shared_tmp, comm, optimizer=optimizer)
    if comm.rank == 0:
        assert [np.asarray(each["1.weight"]).tolist() for each in found] == [expected["1.weight"]] * 4
        opened = ckpt.open(shared_tmp / "c")
        assert all(opened[f"optimizer/{key}/1.weight"][...].tolist() == expected[key] for key in ignored)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("has_state", [0, 1])
def test_an_ignored_parameter_with_state_on_one_rank(comm: Communicator, shared_tmp: Path, has_state: int) -> None:
    """As with a gradient on this rank alone: the state of rank 0 is saved, and if it has none, none is."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mpitrain.fully_shard(model, comm, ignored_params=list(model[1].parameters()))
    optimizer = torch.optim.AdamW(model.parameters())
    if comm.rank == has_state:
        for param in model[1].parameters():
            optimizer.state[param] = {
                "step": torch.tensor(3.0),
                "sums": [torch.ones(2)],
                "exp_avg": torch.ones_like(param),
            }
    mpitrain.save(shared_tmp / "c", model, optimizer)
    mpitrain.load(shared_tmp / "c", model, optimizer)
    state = {name: optimizer.state.get(param) for name, param in model[1].named_parameters()}
    if has_state == 0:
        assert all(its["step"] == 3 and its["exp_avg"].sum() == its["exp_avg"].numel() for its in state.values())
        assert all(its["sums"][0].tolist() == [1, 1] for its in state.values())
    else:
        assert state == {"weight": None, "bias": None}
    if comm.rank == 0:
        assert any("optimizer/" in name for name in ckpt.open(shared_tmp / "c")) == (has_state == 0)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "axes", [{"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2, "tp": 2}, {"tp": 2, "dp_shard": 2}]
)
def test_on_a_mesh(comm: Communicator, shared_tmp: Path, axes: dict[str, int]) -> None:
    model, mesh = with_buffers(), mpitrain.mesh(comm, **axes)
    if "tp" in axes:
        mpitrain.tensor_parallel(model, mesh["tp"])
    mpitrain.fully_shard(model, mesh)
    mark(model, comm.rank)
    for found in saved_everywhere(model, shared_tmp, comm):
        names = [name for name, _ in model.named_buffers()]
        assert values_of(found, names) == {name: {1} for name in names}


@pytest.mark.ranks(2, 4)
def test_in_a_pipeline(comm: Communicator, shared_tmp: Path) -> None:
    """Those of the first rank of each stage."""
    model, mesh = with_buffers(), mpitrain.mesh(comm, pp=2, dp_shard=comm.size // 2)
    pipeline(model, mesh["pp"], "1f1b", micro_batches=2)
    mpitrain.fully_shard(model, mesh)
    mark(model, comm.rank)
    for found in saved_everywhere(model, shared_tmp, comm):
        for block, rank in ((0, 0), (1, comm.size // 2)):
            names = [f"blocks.{block}.mean", f"blocks.{block}.count"]
            assert values_of(found, names) == {name: {rank + 1} for name in names}


@pytest.mark.ranks(2)
def test_checked_mode_names_what_differs(comm: Communicator, shared_tmp: Path) -> None:
    checked = Communicator(comm.mpi.Dup(), checked=True)
    model = mpitrain.fully_shard(normed(), checked)
    torch.manual_seed(comm.rank)
    model(torch.randn(8, 4))
    names = "1.running_mean, 1.running_var, 3.running_mean and 1 more"
    line = f"buffers or ignored parameters differ between the ranks: {names}; those of data rank 0"
    calls = (
        lambda: mpitrain.save(shared_tmp / "c", model),
        lambda: mpitrain.full_state_dict(model),
        lambda: mpitrain.export_weights(model, shared_tmp / "out"),
    )
    for call in calls:
        if comm.rank == 0:
            with pytest.warns(RuntimeWarning, match=line) as caught:
                call()
            assert caught[0].filename == __file__
        else:
            call()
    mpitrain.sync_buffers(model)
    optimizer = mpitrain.optim.AdamW(model.parameters())
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    mpitrain.sync_buffers(model)
    mpitrain.save(shared_tmp / "same", model, optimizer)
    optimizer.state[model[0].weight]["step"] += comm.rank
    with pytest.raises(ValueError, match=r"tensor 'optimizer/step/0.weight' has other values on rank 1 than on rank 0"):
        mpitrain.save(shared_tmp / "other", model, optimizer)
    arrays = {"a": np.ones(3), "b": np.array(comm.rank), "c": ckpt.Shard(np.ones(1), (2,), (comm.rank,))}
    with pytest.raises(ValueError, match=r"tensor 'b' has other values on rank 1 than on rank 0; expected an array"):
        ckpt.save(shared_tmp / "arrays", arrays, comm=checked)
    ckpt.save(shared_tmp / "arrays", arrays, comm=comm)  # not compared
    comm.barrier()
    checked.free()


@pytest.mark.ranks(2)
def test_a_copy_in_node_memory_has_them_too(comm: Communicator) -> None:
    """What `mpitrain.job.elastic` copies: one rank has the box of a buffer."""
    model = mpitrain.fully_shard(with_buffers(), comm)
    collected = weights.collect(model)
    for name, _ in model.named_buffers():
        box = collected.tensors[f"model/{name}"]
        assert (box.data.numel() > 0) == (comm.rank == 0)
