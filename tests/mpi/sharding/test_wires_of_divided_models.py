"""`wire` and `wire_weights` for models that tensor_parallel or pipeline has divided, on ranks that pretend to be on two hosts."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from pretended_hosts import on_hosts

import mpitrain
from collectives import Communicator, Mesh, network_bytes
from mpitrain.models import GPT, GPTConfig, LanguageModel
from mpitrain.models.llama import Llama
from mpitrain.models.sizes import LlamaConfig
from mpitrain.placement.parts import part_of
from mpitrain.sharding import CPUOffloadPolicy, fully_shard
from mpitrain.sharding.unit.unit import sharded_params
from mpitrain.stages import Pipeline, pipeline
from mpitrain.weights.initial_values import initialize

pytestmark = pytest.mark.ranks(4)

STEPS, VOCAB, LENGTH, MICRO = 5, 101, 16, 2


class Parted(CPUOffloadPolicy):
    """As if the CPU's memory were a GPU's."""

    def parts(self, device: torch.device) -> bool:
        return True


def llama(width: int, kv_heads: int) -> LanguageModel:
    return Llama(LlamaConfig(vocab=VOCAB, context=LENGTH, width=width, layers=1, heads=4, kv_heads=kv_heads, inner=100))


def gpt(width: int, heads: int) -> LanguageModel:
    return GPT(GPTConfig(vocab=VOCAB, context=LENGTH, width=width, layers=1, heads=heads))


class Case(NamedTuple):
    """A model, `llama(width, kv_heads)` or `gpt(width, heads)`, and how it is sent."""

    model: Any
    sizes: tuple[int, int]
    options: dict[str, Any]
    sequence: bool = True
    hosts: tuple[int, ...] = (0, 0, 1, 1)
    local: bool = False
    sends_less: bool = True


CASES = {
    "int8": Case(llama, (96, 4), {"wire": "int8"}),
    "weights, shared heads": Case(llama, (64, 1), {"wire": "int8", "wire_weights": "int8", "storage": "private"}),
    "fp8, cut unequally": Case(gpt, (36, 3), {"wire": "fp8", "wire_weights": "fp8"}, sequence=False),
    "bf16, stage 0": Case(gpt, (36, 3), {"wire": "bf16", "stage": 0}),
    "local steps": Case(llama, (96, 1), {"wire": "int8", "stage": 1}, local=True),
    "offload": Case(gpt, (40, 4), {"wire": "int8", "wire_weights": "int8", "storage": "private", "offload_policy": Parted()}),
    "one group on one host": Case(gpt, (36, 2), {"wire": "int8", "wire_weights": "int8"}, hosts=(0, 0, 0, 1), sends_less=False),
}  # fmt: skip


def rows_of(data: Communicator, step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed((step * MICRO + micro) * data.size + data.rank)
    return torch.randint(0, VOCAB, (2, LENGTH), generator=generator)


def steps(model: LanguageModel, mesh: Mesh, *, local: bool = False) -> list[float]:
    """The losses, averaged over the ranks. The gradient of a step is of `MICRO` batches, and is sent once."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    diloco = mpitrain.DiLoCo(model, every=2) if local else None
    data = mesh["dp_replicate", "dp_shard"]
    for step in range(STEPS):
        total = 0.0
        for micro in range(MICRO):
            model.set_requires_gradient_sync(micro == MICRO - 1)
            rows = rows_of(data, step, micro)
            loss = model(rows, rows.roll(-1, 1)) / MICRO
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        if diloco is not None:
            diloco.step()
        losses.append(float(mesh.comm.all_reduce(np.array([total]), "avg")[0]))
    if diloco is not None:
        diloco.outer_step()
    return losses


def staged_steps(pipe: Pipeline, model: LanguageModel, mesh: Mesh) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(STEPS):
        tokens = [rows_of(mesh["dp_shard"], step, micro) for micro in range(MICRO)]
        loss = pipe.step(tokens, last=[{"targets_BL": rows.roll(-1, 1)} for rows in tokens]).sum().item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(mesh.comm.all_reduce(np.array([loss]), "avg")[0]))
    return losses


def assert_alike(model: LanguageModel) -> int:
    """All ranks that hold a parameter alike have the same bits of it. Returns the number of such parameters."""
    count = 0
    with mpitrain.unshard(model):
        for param in sharded_params(model):
            part = part_of(param.full)
            assert part is not None
            for comm in (part.copies, part.tied):
                if comm is not None and comm.size > 1:
                    count += 1
                    for values in (param.full, param.shard):
                        assert len(set(comm.all_gather_object(values.detach().clone().numpy().tobytes()))) == 1, (
                            param.name
                        )
    return count


@pytest.fixture
def hosts(comm: Communicator, request: pytest.FixtureRequest) -> Iterator[Communicator]:
    made = on_hosts(comm.mpi, request.param)
    yield made
    made.free()


@pytest.mark.parametrize(
    ("hosts", "case"), [(case.hosts, case) for case in CASES.values()], ids=list(CASES), indirect=["hosts"]
)
def test_tensor_parallel_ranks_hold_the_same_bits(hosts: Communicator, case: Case) -> None:
    """Norms, biases of row layers, positions, and heads of keys that two ranks share. Each rank's gradients of cut matrices differ."""
    mesh = mpitrain.mesh(hosts, tp=2, dp_replicate=2 if case.local else 1)

    def trained(**options: Any) -> tuple[list[float], int, LanguageModel]:
        model = case.model(*case.sizes)
        mpitrain.tensor_parallel(model, mesh["tp"], sequence=case.sequence)
        fully_shard(model, mesh, **options)
        initialize(model, seed=1)
        before = network_bytes()
        losses = steps(model, mesh, local=case.local)
        return losses, sum(hosts.all_gather_object(network_bytes() - before)), model

    exact = {name: value for name, value in case.options.items() if not name.startswith("wire")}
    of_exact, _, _ = trained(**exact)
    of_encoded, num_bytes, model = trained(**case.options)
    np.testing.assert_allclose(of_encoded, of_exact, rtol=0.02)
    assert (of_encoded != of_exact) == case.sends_less
    assert (num_bytes > 0) == case.sends_less  # the exact algorithm of short arrays is MPI's, which is not counted
    assert assert_alike(model) >= 3
    mesh.free()


@pytest.mark.parametrize("hosts", [(0, 1, 0, 1)], indirect=True)
@pytest.mark.parametrize("stage", [0, 1])
def test_stages_of_a_pipeline_with_tied_weights(hosts: Communicator, stage: int) -> None:
    mesh = mpitrain.mesh(hosts, pp=2)
    losses = []
    for wire in ("fp32", "int8"):
        model = GPT(GPTConfig(vocab=VOCAB, context=LENGTH, width=36, layers=2, heads=3))
        pipe = pipeline(model, mesh["pp"], micro_batches=MICRO)
        fully_shard(model, mesh, stage=stage, wire=wire, wire_weights=wire if stage else "fp32")
        initialize(model, seed=1)
        losses.append(staged_steps(pipe, model, mesh))
        assert assert_alike(model) == 1
    np.testing.assert_allclose(losses[1], losses[0], rtol=0.02)
    assert losses[1] != losses[0]
    mesh.free()
