"""A parameter that no rank has used has no gradient, as in plain torch, so an optimizer neither moves nor decays it."""

import pytest
import torch
from sharded_models import Parted, assert_same, pair_of
from torch import nn
from ways import WAYS

import mpitrain
from collectives import Communicator
from mpitrain.models.llama import Llama
from mpitrain.models.sizes import LlamaConfig
from mpitrain.stages import pipeline

pytestmark = pytest.mark.ranks(2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


class Partly(nn.Module):
    """`unused` is the smallest parameter, no block uses the `gain` that it gets, and what `dead` computes goes nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.unused = nn.Parameter(torch.ones(1))
        self.gain, self.dead, self.head = nn.Parameter(torch.ones(4)), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, self.gain)
        self.dead(x)
        return self.head(x)


def accumulate(model: nn.Module, how: str) -> None:
    """Two micro-batches."""
    x = torch.arange(8.0).view(2, 4) / 8
    if how == "each":
        for part in (x, -x):
            model(part).square().mean().backward()
        return
    with model.no_sync():  # type: ignore[operator]
        model(x).square().mean().backward()
        if how == "no_sync, reduce_gradients":
            model(-x).square().mean().backward()
    if how == "no_sync, backward":
        model(-x).square().mean().backward()
    model.reduce_gradients()  # type: ignore[operator]


@pytest.mark.parametrize("how", ["each", "no_sync, reduce_gradients", "no_sync, backward"])
@pytest.mark.parametrize("way", [*WAYS, "offloaded"])
def test_it_has_none(comm: Communicator, way: str, how: str) -> None:
    more = {"offload_policy": Parted(), "storage": "private"} if way == "offloaded" else {}
    model, plain = pair_of(Partly, comm, None if more else way, **more)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.1) for m in (model, plain)]
    for _ in range(2):
        accumulate(model, how)
        accumulate(plain, "each")
        assert_same(model, plain, grads=True, rtol=1e-5, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, plain, grads=False, rtol=1e-5, atol=1e-6)
    assert all(bool((p == 1).all()) for name, p in model.named_parameters() if name in ("unused", "gain"))


@pytest.mark.rest
@pytest.mark.parametrize("slices", [0, 4])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_it_has_none_in_a_pipeline(comm: Communicator, schedule: str, stage: int, slices: int) -> None:
    """Nor has a weight that two stages share, if neither uses it."""
    torch.manual_seed(0)
    model = Llama(LlamaConfig(vocab=50, context=8, width=8, layers=4, heads=2, tied=True))
    first, *_, last = model.blocks
    first.unused, first.shared = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(3))
    last.shared = first.shared
    mesh = mpitrain.mesh(comm, pp=2)
    pipe = pipeline(model, mesh["pp"], schedule, micro_batches=4)
    mpitrain.fully_shard(model, mesh, stage=stage, storage="private" if stage else "auto", slices=slices)
    tokens = list(torch.randint(0, 50, (4, 2, 8), generator=torch.Generator().manual_seed(0)))
    pipe.step(tokens, last=[{"targets_BL": rows.roll(-1, 1)} for rows in tokens])
    grads = {name for name, param in model.named_parameters() if param.grad is not None}
    assert not {"blocks.0.unused", "blocks.0.shared"} & grads
    assert grads >= {name for name, _ in model.named_parameters() if name.startswith(f"blocks.{comm.rank + 1}.")}
    mesh.free()
