"""Gradients that are sums over the ranks of `tp`, as those of norms under sequence parallelism, are added up unit by unit."""

from typing import Any

import pytest
import torch

import mpitrain
from collectives import Communicator
from mpitrain.models import GPT, GPTConfig
from mpitrain.placement import parts
from mpitrain.sharding import MixedPrecisionPolicy
from mpitrain.weights.initial_values import initialize

SIZES = GPTConfig(vocab=101, context=12, width=24, layers=3, heads=6, tied=False)


def model_on(comm: Communicator, policy: MixedPrecisionPolicy | None = None) -> Any:
    mesh = mpitrain.mesh(comm, tp=2)
    model = GPT(SIZES)
    initialize(model, seed=1)
    mpitrain.tensor_parallel(model, mesh["tp"])
    for block in model.blocks:
        mpitrain.fully_shard(block, mesh, mp_policy=policy or MixedPrecisionPolicy())
    return mpitrain.fully_shard(model, mesh, mp_policy=policy or MixedPrecisionPolicy())


def rows() -> torch.Tensor:
    return torch.randint(0, SIZES.vocab, (4, SIZES.context + 1), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[list[torch.dtype]]:
    """The dtypes of each call that adds up gradients, of those that are not empty."""
    found: list[list[torch.dtype]] = []

    def watched(grads: Any) -> None:
        if grads:
            found.append([grad.dtype for _, grad in grads])
        parts_add(grads)

    parts_add = parts.add_gradients
    monkeypatch.setattr("mpitrain.sharding.unit.gradients.add_gradients", watched)
    monkeypatch.setattr(parts, "add_gradients", watched)
    return found


@pytest.mark.ranks(2, 4)
def test_one_reduction_for_each_unit(comm: Communicator, sums: list[list[torch.dtype]]) -> None:
    model, data = model_on(comm), rows()
    model(data[:, :-1], data[:, 1:]).backward()
    # Of each block: scales and shifts of two norms, and the biases of two row layers. All ranks have all tokens of the rest.
    assert [len(of_unit) for of_unit in sums] == [6] * SIZES.layers


@pytest.mark.ranks(2, 4)
def test_micro_batches_without_a_reduction_add_up_once(comm: Communicator, sums: list[list[torch.dtype]]) -> None:
    model, data = model_on(comm), rows()
    model(data[:, :-1], data[:, 1:]).backward()
    once = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()
    sums.clear()
    with model.no_sync():
        model(data[:, :-1], data[:, 1:]).backward()
    assert not sums
    model(data[:, :-1], data[:, 1:]).backward()
    assert len(sums) == SIZES.layers
    for name, param in model.named_parameters():
        assert param.grad is not None
        torch.testing.assert_close(param.grad, 2 * once[name])


@pytest.mark.ranks(2, 4)
def test_the_sum_has_the_dtype_of_reductions(comm: Communicator, sums: list[list[torch.dtype]]) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, data = model_on(comm, policy), rows()
    model(data[:, :-1], data[:, 1:]).backward()
    assert sums and all(dtype == torch.float32 for of_unit in sums for dtype in of_unit)
