"""Sharded training on real GPUs beside plain training on one of them: every stage, both precisions, copies, and host memory."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mpitrain
from collectives import Communicator, Mesh
from mpitrain.sharding.unit.layout import rows_of

pytestmark = pytest.mark.gpu

SLEEP = 20_000_000  # cycles: a hundredth of a second
WIDTH, STEPS, BATCH = 512, 6, 8  # so many steps that units are gathered ahead; rows of a rank


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def made(device: torch.device, comm: Communicator) -> nn.Sequential:
    """The same values on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(192, WIDTH), *(Block() for _ in range(4)), nn.Linear(WIDTH, 32)).to(device)


def device_of(comm: Communicator) -> torch.device:
    device = torch.device("cuda", comm.node.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: slice,
    comm: Communicator,
    *,
    steps: range = range(STEPS),
    forward: Callable[..., torch.Tensor] | None = None,
    late: bool = False,
) -> list[float]:
    """The norm of the gradient of each step. `late`: the device is behind the host."""
    norms = []
    for step in steps:
        x = torch.randn(BATCH * comm.size, 192, generator=torch.Generator().manual_seed(step))[rows]
        y = (forward or model)(x.to(device_of(comm)))
        if late:
            torch.cuda._sleep(SLEEP)
        y.float().square().mean().backward()
        norms.append(float(mpitrain.clip_grad_norm_(model, 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def mine(comm: Communicator) -> slice:
    return slice(BATCH * comm.rank, BATCH * (comm.rank + 1))


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kept": {"reshard_after_forward": False},
    "offload": {"offload_policy": mpitrain.CPUOffloadPolicy()},
    "copies": {},
}
CASES = [
    (stage, way)
    for stage, way in itertools.product((0, 2, 3), WAYS)
    if not (way == "kept" and stage < 3) and not (way == "copies" and stage == 0)
]


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("stage", "way"), CASES)
def test_the_same_as_plain_training(comm: Communicator, stage: int, way: str, bf16: bool) -> None:
    if way == "copies" and comm.size % 2:
        pytest.skip("two copies need an even number of ranks")
    device = device_of(comm)
    model, plain = made(device, comm), made(device, comm)
    policy = mpitrain.MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else None
    mesh = Mesh(comm, {"dp_replicate": 2, "dp_shard": -1}) if way == "copies" else comm
    mpitrain.fully_shard(model, mesh, stage=stage, mp_policy=policy, **WAYS[way])

    def as_cast(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(
            "cuda", torch.bfloat16, enabled=bf16
        ):  # left each time, because it keeps the weights it has cast
            return plain(x)

    norms = train(model, optimizer_of(model), mine(comm), comm, late=True)
    expected = train(plain, optimizer_of(plain), slice(None), comm, forward=as_cast)
    assert norms == pytest.approx(expected, rel=0.05 if bf16 else 1e-3)
    # AdamW moves an element by the learning rate a step, also one whose tiny gradient has another sign in the other precision.
    reference, limit = dict(plain.named_parameters()), 1.3e-2 if bf16 else 2e-4
    for name, shard in model.named_parameters():
        whole = rows_of(reference[name].detach(), shard.shard_box)  # type: ignore[attr-defined]
        assert not shard.numel() or (shard.detach().cpu() - whole.cpu()).abs().max() < limit, name


def test_a_checkpoint_of_gpus(comm: Communicator, shared_tmp: Path) -> None:
    """What a save holds is what a load gives to another model, and training goes on from there."""
    device, models = device_of(comm), []
    for _ in range(2):
        model = mpitrain.fully_shard(made(device, comm), comm)
        models.append((model, optimizer_of(model)))
    (model, optimizer), (other, its_optimizer) = models
    train(model, optimizer, mine(comm), comm, steps=range(3))
    mpitrain.save(shared_tmp / "there", model, optimizer)
    mpitrain.load(shared_tmp / "there", other, its_optimizer)
    for param, loaded in zip(model.parameters(), other.parameters(), strict=True):
        assert loaded.is_cuda and torch.equal(param, loaded)
        mine_, its = optimizer.state[param], its_optimizer.state[loaded]
        assert mine_.keys() == its.keys() and all(torch.equal(mine_[key], its[key]) for key in its)
        assert all(mine_[key].device == its[key].device for key in its)
    more = [train(m, o, mine(comm), comm, steps=range(3, 5)) for m, o in models]
    assert more[0] == pytest.approx(more[1], rel=1e-5)
