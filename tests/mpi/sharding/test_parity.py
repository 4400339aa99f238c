"""Real models, sharded, against copies of them in plain torch that see the whole batch: ten steps of AdamW.

Losses and gradients are compared at each step, parameters and buffers at the end. Tolerances: fp32 sums over other parts of the batch
differ in rounding, a relative 1e-6 or so in a gradient's largest elements; Adam then divides by the root of a mean square, which makes
of a rounding in a gradient near zero a step of up to `lr`, and ten such steps are few next to 1e-3.
"""

import copy

import pytest
import torch
from parity_models import BATCH, CASES
from ways import options_of, spread

from collectives import Communicator
from mpitrain.sharding import fully_shard
from mpitrain.sharding.unit.layout import rows_of

# what is sharded first, and the way
CUTS = [("itself", "stage 3"), ("itself", "stage 3, private"), ("itself", "stage 0"), ("blocks", "stage 3, private")]
STEPS = 10


def assert_same(model, plain, *, grads: bool, **tolerance: float) -> None:
    """Every shard holds its rows of the plain model's parameter, or of its gradient."""
    sharded, reference = dict(model.named_parameters()), dict(plain.named_parameters())
    assert sharded.keys() == reference.keys()
    for name, shard in sharded.items():
        got, want = (shard.grad, reference[name].grad) if grads else (shard.detach(), reference[name].detach())
        if want is None:
            assert got is None, f"{name} has a gradient, the plain model's has none"
            continue
        want = rows_of(want, shard.shard_box)
        torch.testing.assert_close(got, want, msg=lambda text, n=name: f"{n}: {text}", **tolerance)


@pytest.mark.parametrize(
    ("name", "cut"), spread(CASES, CUTS), ids=lambda value: value if isinstance(value, str) else " by ".join(value)
)
def test_ten_steps(comm: Communicator, name: str, cut: tuple[str, str]) -> None:
    by, way = cut
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make()
    plain = copy.deepcopy(model)
    options = options_of(comm, way)
    mesh = options.pop("mesh", comm)
    for block in case.blocks(model) if by == "blocks" else ():
        fully_shard(block, mesh, **options)
    fully_shard(model, mesh, **options)
    mine = slice(BATCH // comm.size * comm.rank, BATCH // comm.size * (comm.rank + 1))
    optimizer, reference = (torch.optim.AdamW(m.parameters(), lr=3e-3, eps=1e-4, fused=True) for m in (model, plain))
    for step in range(STEPS):
        loss = case.loss(model, step, slice(None) if case.whole_batch else mine)
        loss.backward()
        expected = case.loss(plain, step, slice(None))
        expected.backward()
        mean = loss.detach().clone()
        comm.all_reduce(mean, "avg")
        torch.testing.assert_close(mean, expected.detach(), rtol=1e-4, atol=1e-5)
        assert_same(model, plain, grads=True, rtol=1e-3, atol=1e-5)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    assert expected.isfinite()
    assert_same(model, plain, grads=False, rtol=1e-3, atol=1e-4)
    for (key, buffer), want in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(buffer, want, msg=lambda text, n=key: f"{n}: {text}", rtol=1e-4, atol=1e-5)
