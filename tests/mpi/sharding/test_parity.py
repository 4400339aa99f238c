"""Real models, sharded, against copies of them in plain torch that see the whole batch: steps of AdamW with clipped gradients.

Losses, gradients and their norms are compared at each step, parameters and buffers at the end. Tolerances: fp32 sums over other parts
of the batch differ in rounding, a relative 1e-6 or so in a gradient's largest elements; Adam then divides by the root of a mean square,
which makes of a rounding in a gradient near zero a step of up to `lr`, and ten such steps are few next to 1e-3.
"""

import pytest
import torch
from extent import extent
from parity_models import CASES
from sharded_models import assert_same, mine, no_blocks, pair_of
from torch import nn
from ways import WAYS, spread

from collectives import Communicator
from mpitrain.sharding import clip_grad_norm_

pytestmark = pytest.mark.rest

# what is sharded first, and the way
CUTS = [("itself", "stage 3"), ("itself", "stage 3, private"), ("itself", "stage 0"), ("blocks", "stage 3, private")]
STEPS = extent(5, 10)

# the model, what is sharded first, the way, reshard_after_forward
CELLS = [
    (name, "blocks", way, reshard)
    for name, way, reshard in spread(
        [name for name in CASES if CASES[name].every_way], WAYS, [True, False], all_on_2=False
    )
] + [
    (name, *cut, True)
    for name, cut in spread([name for name in CASES if not CASES[name].every_way], CUTS, all_on_2=False)
]  # fmt: skip


@pytest.mark.shared_cases
@pytest.mark.parametrize(("name", "by", "way", "reshard_after_forward"), CELLS)
def test_steps_beside_plain_torch(
    comm: Communicator, name: str, by: str, way: str, reshard_after_forward: bool
) -> None:
    case = CASES[name]
    losses, grads = ({"rtol": rtol, "atol": atol} for rtol, atol in (case.losses, case.grads))
    blocks = case.blocks if by == "blocks" else no_blocks
    model, plain = pair_of(case.make, comm, way, blocks, reshard_after_forward=reshard_after_forward)
    assert_same(model, plain, grads=False, rtol=0, atol=0)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=case.lr, eps=case.eps, fused=True) for m in (model, plain)]
    for step in range(STEPS):
        loss = case.loss(model, step, slice(None) if case.whole_batch else mine(comm))
        loss.backward()
        expected = case.loss(plain, step, slice(None))
        expected.backward()
        mean = loss.detach().clone()
        comm.all_reduce(mean, "avg")
        torch.testing.assert_close(mean, expected.detach(), **losses)
        assert_same(model, plain, grads=True, **grads)
        norm, want = clip_grad_norm_(model, 0.5), nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        torch.testing.assert_close(norm, want.double(), rtol=1e-5, atol=1e-7)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert expected.isfinite()
    assert_same(model, plain, grads=False, rtol=1e-3, atol=1e-4)
    for (key, buffer), want in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(buffer, want, msg=lambda text, n=key: f"{n}: {text}", rtol=1e-4, atol=1e-5)
