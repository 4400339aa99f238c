"""State dicts of a sharded model and its optimizer load as any, and are not written into a file by what takes them for whole."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from sharded_models import loss_of, pair_with_a_part_on_every_rank, small_model
from torch import nn

import ckpt
import mpitrain
from collectives import Communicator
from mpitrain.models import GPT, GPTConfig
from mpitrain.sharding import fully_shard
from mpitrain.stages import pipeline

pytestmark = pytest.mark.ranks(1, 2)


def sharded(comm: Communicator) -> nn.Module:
    """With a block that was sharded before, and a part that is on every rank alike."""
    return pair_with_a_part_on_every_rank(comm)[0]


SAID = (
    r"0\.weight is divided over ranks: this rank has \(\d, 5\) of \(7, 5\).* mpitrain\.export_weights.* "
    r"mpitrain\.full_state_dict\(model\); write a part, such as an adapter, .* `with mpitrain\.unshard\(model\):`"
)
WHOLE = r"^load_state_dict: {}weight is a whole tensor, of shape \({}\), and this rank has only a part .*mpitrain\.load_full_state_dict"


def write(what: Any) -> None:
    torch.save(what, io.BytesIO())


def test_shards_are_refused_where_one_rank_would_write_its_rows_alone(comm: Communicator, shared_tmp: Path) -> None:
    model = sharded(comm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss_of(model).backward()
    optimizer.step()
    state, kept = model.state_dict(), optimizer.state_dict()
    file = shared_tmp / f"rank-{comm.rank}.safetensors"
    attempts: list[Callable[[], Any]] = [
        lambda: write(state),
        lambda: write({name: value.clone().cpu() for name, value in state.items()}),
        lambda: write({name: value.double() for name, value in state.items()}),
        lambda: write(copy.deepcopy(state)),
        lambda: write({"model": nn.ModuleDict({"outer": model}).state_dict()}),
        lambda: write(list(model.parameters())),
        lambda: write(model.state_dict(keep_vars=True)),
        lambda: write(kept),
        lambda: write(copy.deepcopy(kept)),
        lambda: safetensors.torch.save_file(state, file),
        lambda: safetensors.torch.save(state),
    ]
    if comm.size > 1:  # of one rank safetensors itself refuses it, as parameters lie in one memory
        attempts.append(lambda: safetensors.torch.save_model(model, str(file)))
    for attempt in attempts:
        if comm.size == 1:
            attempt()  # whole, so right
        else:
            with pytest.raises(TypeError, match=SAID):
                attempt()
    assert file.exists() == (comm.size == 1)

    # What is whole may be written, and is right.
    write({name: value for name, value in state.items() if name.startswith("4.")})
    with mpitrain.unshard(model):
        whole = {name: value.clone() for name, value in model.state_dict().items()}
        write(model.state_dict())
        write(list(model.parameters()))
        safetensors.torch.save_file(whole, file)
    full = mpitrain.full_state_dict(model)
    write(full)
    assert all(torch.equal(value, whole[name]) for name, value in full.items())
    copies = fully_shard(small_model(), comm, stage=0)
    write(copies.state_dict())
    write(list(copies.parameters()))


def test_ckpt_save_refuses_shards(comm: Communicator, shared_tmp: Path) -> None:
    """Also where all ranks' rows have one shape, so that they could be copies of a whole tensor, and where a rank saves alone."""
    model = fully_shard(nn.Linear(5, 2 * comm.size, bias=False), comm)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    moments = {what: optimizer.state_dict()["state"][0][what] for what in ("exp_avg", "exp_avg_sq")}
    for number, tensors in enumerate((model.state_dict(), dict(model.named_parameters()), moments)):
        for over, path in ((comm, shared_tmp / f"all-{number}"), (None, shared_tmp / f"{comm.rank}-{number}")):
            if comm.size == 1:
                ckpt.save(path, tensors, comm=over, overwrite=True)
                continue
            with pytest.raises(TypeError, match=r"weight is divided .*: this rank has \(2, 5\) of .* mpitrain\.save"):
                ckpt.save(path, tensors, comm=over)
            assert not path.exists()
    with mpitrain.unshard(model):
        ckpt.save(shared_tmp / "whole", dict(model.named_parameters()), comm=comm)


def test_state_dicts_of_shards_load_as_before(comm: Communicator, shared_tmp: Path) -> None:
    model = sharded(comm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(number: int) -> None:
        loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    mpitrain.save(shared_tmp / "checkpoint", model, optimizer)
    best, kept = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    step(1)
    after = [param.detach().clone() for param in model.parameters()]
    model.load_state_dict(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(after, model.parameters(), strict=True))
    for again in (optimizer, torch.optim.AdamW(model.parameters(), lr=0.1)):
        model.load_state_dict(best)
        again.load_state_dict(copy.deepcopy(kept))  # of which it takes the tensors
        optimizer = again
        step(1)
        assert all(torch.equal(a, b) for a, b in zip(after, model.parameters(), strict=True))
        assert {type(value) for state in again.state.values() for value in state.values()} == {torch.Tensor}
    mpitrain.load(shared_tmp / "checkpoint", model, optimizer)
    step(1)
    assert all(torch.equal(a, b) for a, b in zip(after, model.parameters(), strict=True))
    rows = best["0.weight"]
    assert type(rows.as_subclass(torch.Tensor)) is type(rows.sum()) is torch.Tensor
    assert rows.numpy().shape == rows.shape and f"{rows.flatten().tolist()}" and str(rows)
    assert torch.empty_like(model[0].weight).copy_(rows).equal(rows)


@pytest.mark.parametrize("way", [{}, {"storage": "private"}, {"units": "one"}], ids=str)
@pytest.mark.ranks(2)
def test_whole_tensors_are_refused_with_advice(comm: Communicator, way: dict[str, Any]) -> None:
    """In one line, also by an unsharded module around the model, and where other names are ignored."""

    def made() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))

    whole = {name: torch.full_like(value, 3.0) for name, value in made().state_dict().items()}
    units = way.pop("units", None)
    model = made()
    for part in () if units else model:
        fully_shard(part, comm, **way)
    fully_shard(model, comm, **way)
    outer = nn.ModuleDict({"model": model})
    for prefix, call in (
        ("", lambda: model.load_state_dict(whole)),
        ("", lambda: model.load_state_dict(whole | {"more": torch.ones(1)}, strict=False)),
        ("model.", lambda: outer.load_state_dict({f"model.{name}": value for name, value in whole.items()})),
    ):
        with pytest.raises(RuntimeError, match=WHOLE.format(rf"{prefix}\d\.", "4, 4")) as raised:
            call()
        assert "\n" not in str(raised.value) and "size mismatch" not in str(raised.value)
    with pytest.raises(RuntimeError, match="size mismatch"):  # of no shape that is known here: torch's own message
        model.load_state_dict({name: torch.ones(9, 9) for name in whole})
    mpitrain.load_full_state_dict(model, whole if comm.rank == 0 else {})
    model.load_state_dict(model.state_dict())
    assert all((param == 3).all() for param in model.parameters())
    with mpitrain.unshard(model, write=True):
        model.load_state_dict({name: value + 1 for name, value in whole.items()})
    assert all((param == 4).all() for param in model.parameters())


def test_an_optimizer_may_keep_what_belongs_to_no_parameter(comm: Communicator) -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            self.state["calls"] = self.state.get("calls", 0) + 1
            super().step(closure)

    model = sharded(comm)
    optimizer = Counting(model.parameters(), lr=0.1, momentum=0.9)
    loss_of(model).backward()
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.state["calls"] == 1


class Counting(nn.Linear):
    """Has a value that is no buffer."""

    def __init__(self, state: Any) -> None:
        super().__init__(2, 2)
        self.kept = state

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


@pytest.mark.parametrize("way", ["shards", "stages"])
def test_extra_state_goes_out_and_in(comm: Communicator, shared_tmp: Path, way: str) -> None:
    """That of data rank 0: in state dicts any value, in files of weights a tensor."""
    per_stage = way == "stages" and comm.size == 2

    def model_of(*states: Any) -> tuple[nn.Module, dict[str, Counting]]:
        model: nn.Module = GPT(GPTConfig(vocab=20, context=4, width=8, layers=2, heads=2, tied=False))
        for block, state in zip(model.blocks, states, strict=True):
            block.counting = Counting(state)
        if per_stage:
            mesh = mpitrain.mesh(comm, pp=2)
            pipeline(model, mesh["pp"], "1f1b", micro_batches=2)
        fully_shard(model, mesh if per_stage else comm)
        return model, {name: each for name, each in model.named_modules() if isinstance(each, Counting)}

    number = 0 if per_stage else comm.rank
    expected = {"blocks.0.counting": {"n": 0, "all": [1, (2,)]}, "blocks.1.counting": torch.tensor([0.5])}
    model, _ = model_of({"n": number, "all": [1, (2,)]}, torch.tensor([number + 0.5]))
    full = mpitrain.full_state_dict(model)
    mpitrain.save(shared_tmp / "c", model)
    mpitrain.export_weights(model, shared_tmp / "out")
    if comm.rank == 0:
        plain = GPT(GPTConfig(vocab=20, context=4, width=8, layers=2, heads=2, tied=False))
        for block in plain.blocks:
            block.counting = Counting(None)
        plain.load_state_dict(full)
        assert {f"blocks.{n}.counting": block.counting.kept for n, block in enumerate(plain.blocks)} == expected
    other, its = model_of({"n": 9}, torch.tensor([9.0, 9.0]))
    mpitrain.load_full_state_dict(other, full)
    assert {name: each.kept for name, each in its.items()} == {name: expected[name] for name in its}
    other, its = model_of({"n": 9}, torch.tensor([9.0, 9.0]))
    mpitrain.load(shared_tmp / "c", other)
    assert {name: each.kept for name, each in its.items()} == {name: expected[name] for name in its}
    other, its = model_of({"n": 9}, torch.tensor([9.0]))
    mpitrain.load_weights(other, shared_tmp / "out")
    assert its.get("blocks.1.counting", Counting(torch.tensor([0.5]))).kept.tolist() == [0.5]
    with pytest.raises(ValueError, match=r"meta has \['optimizer'\], which mpitrain has there itself"):
        mpitrain.save(shared_tmp / "d", model, meta={"optimizer": 1} if comm.rank == 0 else {})
    full.pop("blocks.1.counting._extra_state", None)
    with pytest.raises(ValueError, match=r"the state dict lacks blocks\.1\.counting\._extra_state and has nothing"):
        mpitrain.load_full_state_dict(other, full)
