"""The warning that all ranks train on the same inputs."""

import warnings
from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sharded_models import shard
from torch import nn
from ways import options_of

import mpitrain
from collectives import Communicator
from mpitrain.models.llama import Llama
from mpitrain.models.sizes import LlamaConfig
from mpitrain.sharding.step.checks.same_inputs import hash_on_device
from mpitrain.stages import pipeline

pytestmark = pytest.mark.ranks(2)


class Takes(nn.Linear):
    """A model that takes any inputs."""

    def __init__(self) -> None:
        super().__init__(2, 2)

    def forward(self, *inputs: Any, **named: Any) -> torch.Tensor:
        return self.weight.sum()


def said(model: nn.Module, *inputs: Any, steps: int = 3, **named: Any) -> list[str]:
    """What a model warns of in some steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            model(*inputs, **named).backward()
    return [str(each.message) for each in caught]


@dataclass
class Batch:
    tokens: torch.Tensor
    note: str = ""


Pair = namedtuple("Pair", ["x", "y"])


def _as(dtype: torch.dtype, x: torch.Tensor) -> tuple[torch.Tensor]:
    return ((x > 0).to(dtype),)


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64]
INPUTS: dict[str, Callable[[torch.Tensor], tuple[Any, ...]]] = {
    **{str(dtype): partial(_as, dtype) for dtype in DTYPES},
    "part of a tensor": lambda x: (x[1:, ::2],),
    "among equal ones": lambda x: (torch.ones(2), x, torch.zeros(3)),
    "dict": lambda x: ({"a": {"b": [x]}},),
    "mapping": lambda x: (UserDict(ids=x),),
    "tuple": lambda x: (Pair(x, (1, x)),),
    "dataclass": lambda x: ([Batch(x)],),
    "object": lambda x: (SimpleNamespace(inner=SimpleNamespace(x=x)),),
    "requires grad": lambda x: (x.clone().requires_grad_(),),
}


def drawn(seed: int) -> torch.Tensor:
    return torch.randn(5, 7, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("is_named", [False, True])
def test_equal_inputs_are_noticed_and_others_are_not(comm: Communicator, kind: str, is_named: bool) -> None:
    def run(seed: int) -> list[str]:
        inputs = INPUTS[kind](drawn(seed))
        named = {f"x{place}": each for place, each in enumerate(inputs)} if is_named else {}
        return said(shard(Takes(), comm), *(() if is_named else inputs), **named)

    [text] = run(0)
    assert text.startswith("all 2 ranks train on the same inputs")
    assert "DistributedSampler(dataset, comm.size, comm.rank)" in text
    assert "mpitrain.data.batches" in text
    assert run(comm.rank) == []


@pytest.mark.parametrize(
    "way", ["stage 0", "stage 1", "stage 2, private", "stage 3", "stage 3, private", "copies of shards"]
)
def test_ways(comm: Communicator, way: str) -> None:
    """Also after a forward without gradients, and if the first backwards reduce nothing."""
    for is_equal in (True, False):
        model = shard(Takes(), comm, **options_of(comm, way))
        with torch.no_grad():
            model(torch.tensor(comm.rank))
        with model.no_sync():  # type: ignore[operator]
            assert said(model, torch.ones(2), steps=1) == []
        assert (said(model, torch.tensor(0 if is_equal else comm.rank), steps=1) != []) is is_equal
        assert said(model, torch.ones(2)) == [], "once, of the first ones"


def test_an_evaluation_with_gradients_on_the_same_rows_decides_nothing(comm: Communicator) -> None:
    for seed, is_equal in ((0, True), (comm.rank, False)):
        model = shard(Takes(), comm)
        model.eval()
        for _ in range(2):
            model(drawn(7))
        model.train()
        assert (said(model, drawn(seed)) != []) is is_equal


def test_inputs_without_a_tensor_or_with_other_numbers(comm: Communicator) -> None:
    for inputs in ((), (3, "text", None), (torch.empty(0, 4),), (torch.eye(2).to_sparse(),), (np.ones(3),)):
        assert said(shard(Takes(), comm), *inputs) == []
    for other in ({1}, torch.Generator().manual_seed(0), range(2)):
        assert said(shard(Takes(), comm), torch.ones(2), other) != []
    made = torch.Generator().manual_seed(comm.rank)
    for other in ({comm.rank}, frozenset({comm.rank}), made, range(comm.rank), (i for i in range(2)), object()):
        assert said(shard(Takes(), comm), torch.ones(2), other) == []
    for other in (comm.rank, f"task {comm.rank}", np.full(2, comm.rank)):
        assert said(shard(Takes(), comm), torch.ones(2), other) == []


@pytest.mark.ranks(1, 2, 4)
def test_tensor_parallel_ranks_get_the_same(comm: Communicator) -> None:
    mesh = mpitrain.mesh(comm, tp=min(comm.size, 2))
    for is_same in (False, True):
        model = mpitrain.tensor_parallel(Llama(LlamaConfig(vocab=8, context=4, width=8, layers=2, heads=2)), mesh["tp"])
        mpitrain.fully_shard(model, mesh)
        tokens = torch.full((1, 4), 1 if is_same else mesh["dp_shard"].rank)
        assert bool(said(model, tokens, tokens)) == (is_same and comm.size == 4)
    mesh.free()


@pytest.mark.ranks(2, 4)
def test_the_first_stages_of_pipelines_are_compared(comm: Communicator) -> None:
    mesh = mpitrain.mesh(comm, pp=2)
    for is_same in (False, True):
        model = Llama(LlamaConfig(vocab=8, context=4, width=8, layers=4, heads=2))
        pipe = pipeline(model, mesh["pp"], "zb-v", micro_batches=2)
        mpitrain.fully_shard(model, mesh)
        tokens = [torch.full((1, 4), 1 if is_same else mesh["dp_shard"].rank)] * 2
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pipe.step(tokens, last=[{"targets_BL": rows} for rows in tokens])
        assert bool(caught) == (is_same and comm.size == 4 and mesh["pp"].rank == 0)
    mesh.free()


def test_filters(comm: Communicator) -> None:
    """By default one rank shows it; an error comes on all ranks, after which the training goes on."""
    model = shard(Takes(), comm)
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        for category in (ResourceWarning, ImportWarning):
            warnings.simplefilter("ignore", category)  # as Python does
        model(torch.ones(2)).backward()
    assert [each.filename for each in caught] == ([__file__] if comm.rank == 0 else [])
    model = shard(Takes(), comm)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with pytest.raises(RuntimeWarning, match="all 2 ranks"):
            model(torch.ones(2)).backward()
        model(torch.ones(2)).backward()
    assert model.weight.grad is not None


def test_a_hash_that_is_late_is_compared_later(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device that has not computed the hash of the first forward when the first backward ends."""
    from mpitrain.sharding.step.checks import same_inputs

    arrived = False
    late = property(lambda self: arrived or comm.rank == 0)
    monkeypatch.setattr(same_inputs._OnItsWay, "is_there", late)
    model = shard(Takes(), comm)
    compared = model._step = mpitrain.sharding.module.step_of(model)
    of_device = same_inputs._OnItsWay(hash_on_device(torch.ones(9, dtype=torch.uint8)))
    compared._inputs._is_closed = compared._inputs._has_tensors = True
    compared._inputs._hashes = {torch.device("cuda"): of_device}
    assert said(model, torch.ones(2)) == []
    arrived = True
    assert len(said(model, torch.ones(2))) == 1


@pytest.mark.ranks(1)
def test_the_hash_of_a_device() -> None:
    """It depends on each bit and its place, also on bits of the sign, and on the length."""
    memory = torch.zeros(41, dtype=torch.uint8)
    found = {hash_on_device(memory).item(), hash_on_device(memory[:40]).item()}
    for place in range(41):
        for bit in (1, 128):
            changed = memory.clone()
            changed[place] = bit
            found.add(hash_on_device(changed).item())
    both = memory.clone()
    both[7] = both[15] = 128
    found.add(hash_on_device(both).item())
    assert len(found) == 2 + 2 * 41 + 1
