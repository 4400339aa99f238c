"""Sums of gradients of micro-batches: the first one is 256, to which bfloat16 cannot add the ones that follow."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from sharded_models import Parted, shard
from torch import nn

import mpitrain
from collectives import Communicator
from mpitrain.plans.stage_plan import StagePlan
from mpitrain.stages import pipeline

FACTORS = [256.0, *[1.0] * 8]
TOTAL = sum(FACTORS)
BF16_IN_FP32 = mpitrain.MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class Scale(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 3, dtype=dtype))
        self.sometimes = nn.Parameter(torch.ones(4, dtype=dtype))

    def forward(self, factor: float, is_last: bool = False) -> torch.Tensor:
        return factor * (self.weight.sum() + (self.sometimes.sum() if is_last else 0))


def accumulate(model: nn.Module, *, under_no_sync: bool, factors: Sequence[float] = FACTORS) -> None:
    for micro, factor in enumerate(factors, 1):
        is_last = micro == len(factors)
        with model.no_sync() if under_no_sync and not is_last else nullcontext():  # type: ignore[operator]
            model(factor, is_last).backward()


def assert_grads(model: Any, weight: float, sometimes: float) -> None:
    for param, value in ((model.weight, weight), (model.sometimes, sometimes)):
        torch.testing.assert_close(param.grad, torch.full_like(param, value), rtol=0, atol=0)


WAYS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "resident": {"storage": "resident"},
    "private": {"storage": "private"},
    "offloaded": {"storage": "private", "offload_policy": Parted()},
}


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["masters", "bfloat16"])
@pytest.mark.parametrize("under_no_sync", [True, False])
def test_the_sum_has_the_bits_of_the_reductions(
    comm: Communicator, way: str, dtype: torch.dtype, under_no_sync: bool
) -> None:
    model = shard(Scale(dtype), comm, mp_policy=BF16_IN_FP32, **WAYS[way])
    for _ in range(2):  # the second step begins anew
        accumulate(model, under_no_sync=under_no_sync)
        assert_grads(model, TOTAL, 1)
        model.zero_grad()


@pytest.mark.ranks(2)
def test_what_a_program_writes_into_a_gradient_counts(comm: Communicator) -> None:
    model = shard(Scale(torch.bfloat16), comm, mp_policy=BF16_IN_FP32)
    accumulate(model, under_no_sync=False)
    for param in model.parameters():
        assert param.grad is not None
        param.grad.data.mul_(0.5)  # unseen by autograd's counters
    accumulate(model, under_no_sync=False)
    assert_grads(model, TOTAL * 1.5, 1.5)
    model.zero_grad(set_to_none=False)
    accumulate(model, under_no_sync=False)
    assert_grads(model, TOTAL, 1)


@pytest.mark.ranks(2)
def test_sums_of_no_sync_are_dropped_with_the_gradients(comm: Communicator) -> None:
    model = shard(Scale(torch.bfloat16), comm, mp_policy=BF16_IN_FP32)
    with model.no_sync():
        model(1.0).backward()
    with pytest.raises(RuntimeError, match="under no_sync wait to be reduced"):
        mpitrain.clip_grad_norm_(model, 1.0)
    model.zero_grad()
    accumulate(model, under_no_sync=True, factors=[1.0, 1.0])
    assert_grads(model, 2, 1)


class Layers(nn.Module):
    stage_plan = StagePlan(blocks="blocks", stream="x", input="tokens", first=(), last=())

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, tokens: torch.Tensor | None = None, x: torch.Tensor | None = None) -> torch.Tensor:
        x = tokens if x is None else x
        for block in self.blocks:
            x = block(x)
        assert x is not None
        return x


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_in_a_pipeline(comm: Communicator, schedule: str, stage: int) -> None:
    model, mesh = Layers(), mpitrain.mesh(comm, pp=2)
    for block in model.blocks:
        nn.init.eye_(block.weight)  # type: ignore[arg-type]
        nn.init.zeros_(block.bias)  # type: ignore[arg-type]
    pipe = pipeline(model, mesh["pp"], schedule, micro_batches=len(FACTORS))
    mpitrain.fully_shard(model, mesh, stage=stage, mp_policy=BF16_IN_FP32)
    pipe.step([torch.ones(1, 4)] * len(FACTORS), lambda output, micro: FACTORS[micro] * output.float().sum())
    for param in model.parameters():
        torch.testing.assert_close(param.grad, torch.full_like(param, TOTAL), rtol=0, atol=0)
    mesh.free()
