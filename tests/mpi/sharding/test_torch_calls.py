"""torch's own clipping and loss scaling on a sharded model give what they give on the whole one.

`clip_grad_norm_` is imported before any model is sharded, as scripts do.
"""

import math
from collections.abc import Iterator

import pytest
import torch
from sharded_models import assert_same, loss_of, pair_with_a_part_on_every_rank
from torch import nn
from torch.nn.utils import clip_grad_norm_
from ways import WAYS

from collectives import Communicator
from mpitrain.sharding import fully_shard

pytestmark = pytest.mark.ranks(1, 2)


def grad_of(param: nn.Parameter) -> torch.Tensor:
    assert param.grad is not None
    return param.grad


def norms_of(model: nn.Module) -> Iterator[torch.Tensor]:
    """Clips several times, to ever smaller norms; the norms before."""
    yield clip_grad_norm_(model.parameters(), 0.05)
    yield clip_grad_norm_(list(model.parameters()), 1e-2, norm_type=math.inf)
    yield clip_grad_norm_(model[3].parameters(), 1e-3, norm_type=3.0)
    yield torch.nn.utils.clip_grad_norm_(model[3].weight, 1e-4, norm_type=1, foreach=False)
    yield torch.nn.utils.get_total_norm([param.grad for param in model.parameters()])


@pytest.mark.parametrize("way", WAYS)
def test_torchs_clip_grad_norm(comm: Communicator, way: str) -> None:
    model, plain = pair_with_a_part_on_every_rank(comm, way)
    for each in (model, plain):
        loss_of(each).backward()
    for ours, theirs in zip(norms_of(model), norms_of(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    assert_same(model, plain, grads=True, rtol=1e-4, atol=1e-6)
    overflow(model)
    for order in (2.0, math.inf):
        with pytest.raises(RuntimeError, match="cannot be clipped"):
            clip_grad_norm_(model.parameters(), 1.0, order, error_if_nonfinite=True)


def overflow(model: nn.Module) -> None:
    """In one row of the gradient of one parameter, which one rank has of each copy of the model."""
    weight = model[0].weight
    box = getattr(weight, "shard_box", None)
    if box is None or (box.numel and box.offset[0] + box.shape[0] == box.full_shape[0]):
        grad_of(weight)[-1] = math.inf


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_torchs_grad_scaler(comm: Communicator, way: str, fused: bool) -> None:
    model, plain = pair_with_a_part_on_every_rank(comm, way)
    pairs = []
    for each in (model, plain):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1, fused=fused)
        pairs.append((each, optimizer, torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)))
    scales: list[list[float]] = [[], []]
    for step in range(5):
        for of_model, (each, optimizer, scaler) in zip(scales, pairs, strict=True):
            scaler.scale(loss_of(each, step)).backward()
            if step == 1:
                overflow(each)
            if step == 2:
                scaler.unscale_(optimizer)
                clip_grad_norm_(each.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            of_model.append(scaler.get_scale())
    assert scales[0] == scales[1] == [1024, 512, 512, 1024, 1024]
    assert_same(model, plain, grads=False, rtol=1e-4, atol=1e-6)


def test_a_grad_scaler_of_models_over_different_communicators(comm: Communicator) -> None:
    comms = [comm.split(0) for _ in range(2)]
    torch.manual_seed(0)
    models = [fully_shard(nn.Linear(4, 4), each) for each in comms]
    optimizer = torch.optim.SGD([param for model in models for param in model.parameters()], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    with pytest.raises(AssertionError, match="No inf checks"):  # torch's own, before a backward
        scaler.step(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(2):
        scaler.scale(sum(model(torch.ones(4)).sum() for model in models)).backward()
        weight = models[1].weight
        if step == 0 and weight.numel() and weight.shard_box.offset[0] == 0:
            grad_of(weight)[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == 512
    del models, optimizer, weight
    for each in comms:
        each.free()
