"""Models whose shards are marked as ordered: the norms, and what clipping and LAMB and LARS make of them, have the bits of one rank.

The gradients are given, and not computed: they are the same at any number of ranks.
"""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from ways import WAYS, options_of, spread

import mpitrain
from collectives import Communicator
from mpitrain.models import GPT, GPTConfig, decay_groups
from mpitrain.placement.marks import box_of, mark_spread, spread_of
from mpitrain.placement.parts import part_of
from mpitrain.sharding.unit.layout import rows_of
from mpitrain.stages import pipeline

STEPS = 3


class Odd(nn.Module):
    """Rows of one element to more than a block, fewer rows than ranks, and sizes that no number of ranks divides.

    LAMB gets matrices with rows of whole vector registers: torch's fused AdamW, which it uses, rounds the rest of a shard differently.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(48, 13), nn.LayerNorm(13)) for _ in range(2))
        self.filters = nn.Conv2d(16, 5, 3)
        self.long = nn.Parameter(torch.randn(1, 2, 2064))
        self.odd = nn.Parameter(torch.randn(31, 7))
        self.scale = nn.Parameter(torch.tensor(1.5))


def order(model: nn.Module) -> nn.Module:
    """Mark the shards as those of a model with slices."""
    for param in model.parameters():
        if (found := spread_of(param)) is not None:
            of = found._asdict() | {"is_ordered": True}
            mark_spread(param, of.pop("full_shape"), **of)
    return model


def give_gradients(model: nn.Module, plain: nn.Module, step: int) -> None:
    """Of many magnitudes, so that each order of a sum has other bits."""
    generator = torch.Generator().manual_seed(step)
    for name, whole in plain.named_parameters():
        grad = torch.randn(whole.shape, generator=generator) * 10 ** (2 * torch.rand(whole.shape, generator=generator))
        if name in (mine := dict(model.named_parameters())):
            mine[name].grad = on_this_rank(mine[name], grad).clone()


def on_this_rank(param: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    part, box = part_of(param), box_of(param)
    whole = whole if part is None else part.take(whole)
    return whole if box is None else rows_of(whole, box)


def assert_same_bits(model: nn.Module, alone: nn.Module) -> None:
    """Of parameters and gradients."""
    whole = dict(alone.named_parameters())
    for name, param in model.named_parameters():
        for mine, its in ((param.detach(), whole[name].detach()), (param.grad, whole[name].grad)):
            assert mine is not None and its is not None
            assert torch.equal(mine, on_this_rank(param, its.view_as(dict(alone.named_parameters())[name]))), name


@pytest.fixture
def alone(comm: Communicator) -> Iterator[Communicator]:
    """This rank."""
    own = comm.split(comm.rank)
    yield own
    own.free()


def lars(model: nn.Module) -> torch.optim.Optimizer:
    return mpitrain.optim.LARS(decay_groups(model, 0.1), lr=10.0)


def lamb(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [
        param for name, param in model.named_parameters() if name.endswith(("0.weight", "filters.weight", "long"))
    ]
    return mpitrain.optim.LAMB(matrices, lr=0.02)


@pytest.mark.rest
@pytest.mark.shared_cases
@pytest.mark.parametrize(("make", "way"), spread([lars, lamb], WAYS, all_on_2=False))
def test_on_shards(
    comm: Communicator, alone: Communicator, make: Callable[[nn.Module], torch.optim.Optimizer], way: str
) -> None:
    options = options_of(comm, way)
    plain, model, reference = Odd(), Odd(), Odd()
    mesh = options.pop("mesh", comm)
    for module in (*model.blocks, model):
        mpitrain.fully_shard(module, mesh, **options)
    mpitrain.fully_shard(reference, alone)
    optimizers = [(each, make(order(each))) for each in (model, reference)]
    for step in range(STEPS):
        norms = []
        for each, optimizer in optimizers:
            give_gradients(each, plain, step)
            norms.append(mpitrain.grad_norms(each))
            norms.append(mpitrain.clip_grad_norm_(each, 1.0).item())
            for kind in (1.0, 2.0, 2.5, math.inf):
                norms.append(nn.utils.clip_grad_norm_(each.parameters(), 0.9, kind).item())
            optimizer.step()
        assert norms[: len(norms) // 2] == norms[len(norms) // 2 :]
        assert norms[1] == pytest.approx(math.hypot(*norms[0].values()), rel=1e-12)
        assert_same_bits(model, reference)


@pytest.mark.ranks(2, 4)
def test_in_stages(comm: Communicator, alone: Communicator) -> None:
    """Of shards on 4 ranks. A tied parameter, which two stages have, counts once."""
    config = GPTConfig(vocab=51, context=8, width=24, layers=3, heads=3)
    plain, model, reference = (GPT(config) for _ in range(3))
    mesh = mpitrain.mesh(comm, pp=2)
    try:
        pipeline(model, mesh["pp"], "1f1b", micro_batches=2)
        mpitrain.fully_shard(model, mesh)
        mpitrain.fully_shard(reference, alone)
        norms = []
        for each in (order(model), order(reference)):
            give_gradients(each, plain, 0)
            norms += [mpitrain.grad_norms(each), mpitrain.clip_grad_norm_(each, 1.0).item()]
        assert norms[:2] == norms[2:]
    finally:
        mesh.free()
