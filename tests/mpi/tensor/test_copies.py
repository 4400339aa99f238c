"""Copies and files of a cut model: a copy trains as the model does, and no file has this rank's parts in place of whole parameters."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
import mpitrain
from collectives import Communicator
from mpitrain.models import GPT, GPTConfig
from mpitrain.weights.initial_values import initialize

pytestmark = pytest.mark.ranks(2)


def plain() -> GPT:
    model = GPT(GPTConfig(vocab=50, context=8, width=12, layers=2, heads=2, tied=False))
    initialize(model, seed=1)
    return model


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, **sizes)
    )


def step(model: Any, number: int) -> float:
    """One step; the loss and the norm before it."""
    x = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(number))
    loss: torch.Tensor = model(x[:, :-1], x[:, 1:])
    loss.backward()
    norm = mpitrain.clip_grad_norm_(model, 0.3).item()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()
    return loss.item() + norm


@pytest.mark.parametrize("sequence", [False, True])
def test_a_copy_trains_as_the_model(comm: Communicator, sequence: bool) -> None:
    """Also in turns with the model: they share the exchanges, and no more."""
    reference = plain()
    model = mpitrain.tensor_parallel(plain(), comm, sequence=sequence)
    twin = copy.deepcopy(model)
    again = copy.deepcopy(twin)
    initialize(again, seed=2)
    for number in range(3):
        expected = step(reference, number)
        step(again, number)
        assert step(model, number) == pytest.approx(expected, rel=1e-5)
        assert step(twin, number) == pytest.approx(expected, rel=1e-5)
    whole = mpitrain.full_state_dict(twin)
    for name, value in whole.items():
        torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-4, atol=1e-6)
    assert not any("FirstCheck" in repr(hook) for part in twin.modules() for hook in part._forward_hooks.values())


def test_an_average_and_a_sharded_copy(comm: Communicator) -> None:
    reference, mesh = plain(), mpitrain.mesh(comm, tp=2)
    model = mpitrain.tensor_parallel(plain(), mesh["tp"])
    average = torch.optim.swa_utils.AveragedModel(model)
    sharded = mpitrain.fully_shard(copy.deepcopy(model), mesh)
    for number in range(2):
        expected = step(reference, number)
        assert step(model, number) == pytest.approx(expected, rel=1e-5)
        assert step(sharded, number) == pytest.approx(expected, rel=1e-5)
        average.update_parameters(model)
    torch.testing.assert_close(average.module.head.weight, model.get_parameter("head.weight"), rtol=0.1, atol=0.1)
    with pytest.raises(TypeError, match="a sharded model cannot be copied"):
        copy.deepcopy(sharded)
    mesh.free()


def test_a_copy_of_a_transformers_model(comm: Communicator) -> None:
    model = mpitrain.tensor_parallel(llama(), comm)
    x = torch.arange(8)[None]
    twin = copy.deepcopy(model)
    outputs = [each(input_ids=x, labels=x) for each in (llama(), model, twin)]
    assert outputs[1].loss.item() == outputs[2].loss.item() == pytest.approx(outputs[0].loss.item(), rel=1e-5)
    assert outputs[2].logits is None


PART = r"is divided over ranks: this rank has \(25, 12\) of \(50, 12\).*mpitrain\.save or mpitrain\.export_weights"


@pytest.mark.parametrize("shards", [False, True])
def test_no_file_has_parts_in_place_of_whole_tensors(comm: Communicator, shared_tmp: Path, shards: bool) -> None:
    mesh = mpitrain.mesh(comm, tp=2)
    model = mpitrain.tensor_parallel(plain(), mesh["tp"])
    if shards:
        mpitrain.fully_shard(model, mesh)
    state = model.state_dict()
    tensors: list[Callable[[], Any]] = [
        lambda: torch.save(state, io.BytesIO()),
        lambda: torch.save(copy.deepcopy(state), io.BytesIO()),
        lambda: torch.save({name: value.half().cpu() for name, value in state.items()}, io.BytesIO()),
        lambda: torch.save(nn.ModuleDict({"outer": model}).state_dict(), io.BytesIO()),
        lambda: ckpt.save(shared_tmp / "state", {"w": state["wte.weight"]}, comm=comm),
    ]
    if not shards:
        tensors.append(lambda: ckpt.save(shared_tmp / "state", {"w": model.get_parameter("wte.weight")}, comm=comm))
    for write in tensors:
        with pytest.raises(TypeError, match=PART):
            write()
    pickles: list[Callable[[], Any]] = [lambda: pickle.dumps(model), lambda: torch.save(model, io.BytesIO())]
    for write in pickles:
        with pytest.raises(TypeError, match=r"cannot be pickled.* mpitrain\.save, or pickle mpitrain\.full_state_dict"):
            write()
    with pytest.raises(TypeError, match="cannot be pickled"):
        torch.save(list(model.parameters()), io.BytesIO())
    torch.save({name: value for name, value in state.items() if name.endswith("ln1.bias")}, io.BytesIO())  # whole
    model.load_state_dict(copy.deepcopy(state))
    mesh.free()


@pytest.mark.parametrize("shards", [False, True])
def test_transformers_writes_no_part(comm: Communicator, shared_tmp: Path, shards: bool) -> None:
    mesh = mpitrain.mesh(comm, tp=2)
    model: Any = mpitrain.tensor_parallel(llama(), mesh["tp"])
    if shards:
        mpitrain.fully_shard(model, mesh)
    with pytest.raises(TypeError, match=r"divided over ranks: this rank has \(32, 16\).*mpitrain\.export_weights"):
        model.save_pretrained(shared_tmp / str(comm.rank))
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(model)
    mesh.free()


@pytest.mark.parametrize("shards", [False, True])
def test_whole_tensors_load_by_another_function(comm: Communicator, shards: bool) -> None:
    mesh = mpitrain.mesh(comm, tp=2)
    model = mpitrain.tensor_parallel(plain(), mesh["tp"])
    if shards:
        mpitrain.fully_shard(model, mesh)
    whole = plain().state_dict()
    with pytest.raises(RuntimeError, match=r"wte\.weight is a whole tensor, .*\(25, 12\); .*load_full_state_dict"):
        model.load_state_dict(whole)
    mpitrain.load_full_state_dict(model, whole)
    mesh.free()
