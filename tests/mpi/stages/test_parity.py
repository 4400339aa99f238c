"""A model in stages trains as the plain model does, by every schedule."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import nn

import mpitrain
from collectives import Communicator
from mpitrain.models import GPT, GPTConfig, LanguageModel
from mpitrain.models.llama import Llama
from mpitrain.models.sizes import LlamaConfig
from mpitrain.stages import pipeline
from tests.helpers.extent import extent

STEPS, MICRO = extent(3, 10), 8
SIZES = {"vocab": 50, "context": 16, "width": 24, "heads": 2}
LAYERS = 11  # for 12 stages
FEW = 5  # for 4 stages


def gpt(layers: int = LAYERS) -> LanguageModel:
    torch.manual_seed(0)
    return GPT(GPTConfig(**SIZES, layers=layers, tied=False))


def tied_llama(layers: int = LAYERS) -> LanguageModel:
    torch.manual_seed(0)
    return Llama(LlamaConfig(**SIZES, layers=layers, tied=True))


def batches(step: int, rank: int = 0) -> list[torch.Tensor]:
    """Micro-batches of different sizes."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randint(0, 50, (2, 8 + micro % 3), generator=generator) for micro in range(MICRO)]


def targets(tokens: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [{"targets_BL": rows.roll(-1, 1)} for rows in tokens]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)


class Reference(NamedTuple):
    losses: list[float]
    grads: list[dict[str, torch.Tensor]]  # of each step, by all names of a parameter
    norms: list[float]
    model: LanguageModel  # after the last step


@functools.cache
def trained_alone(make: Callable[[], LanguageModel], num_ranks: int = 1, clip_norm: float = math.inf) -> Reference:
    """The plain model, trained on the micro-batches of so many ranks. Once for all schedules."""
    model = make()
    optimizer, losses, grads, norms = adamw(model), [], [], []
    for step in range(STEPS):
        total = 0.0
        for rows in [rows for rank in range(num_ranks) for rows in batches(step, rank)]:
            loss = model(rows, rows.roll(-1, 1)) / num_ranks
            loss.backward()
            total += loss.item()
        losses.append(total)
        params = model.named_parameters(remove_duplicate=False)
        grads.append({name: param.grad.clone() for name, param in params if param.grad is not None})
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return Reference(losses, grads, norms, model)


SCHEDULES = [
    *((name, None) for name in ("gpipe", "1f1b", "zb-h1", "zb-v", "dualpipe-v")),
    ("interleaved", 2),
    ("interleaved", 3),
]


@pytest.mark.rest
@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize(("schedule", "stages"), SCHEDULES)
@pytest.mark.parametrize("make", [gpt, tied_llama])
def test_steps_beside_the_plain_model(
    comm: Communicator, make: Callable[[], LanguageModel], schedule: str, stages: int | None
) -> None:
    plain, model = trained_alone(make), make()
    pipe = pipeline(model, comm, schedule, micro_batches=MICRO, stages_per_rank=stages)
    whole = dict(plain.model.named_parameters(remove_duplicate=False))
    mine, all_of_it = (sum(p.numel() for p in each.parameters()) for each in (model, plain.model))
    assert comm.size == 1 or mine < all_of_it
    optimizer = adamw(model)
    for step in range(STEPS):
        tokens = batches(step)
        assert pipe.step(tokens, last=targets(tokens)).sum().item() == pytest.approx(plain.losses[step], rel=1e-6)
        for name, param in model.named_parameters():
            grad = plain.grads[step][name]
            assert param.grad is not None
            assert (param.grad - grad).abs().max() <= 1e-5 * grad.abs().max()
        optimizer.step()
        optimizer.zero_grad()
    for name, param in model.named_parameters():
        torch.testing.assert_close(param, whole[name], rtol=0, atol=2e-5)


ZERO = extent(
    [
        (gpt, "1f1b", 1, "resident"),
        (tied_llama, "zb-h1", 2, "private"),
        (tied_llama, "zb-v", 3, "resident"),
        (tied_llama, "1f1b", 3, "private"),
        (tied_llama, "interleaved", 0, "auto"),
    ],
    [
        (make, schedule, stage, storage)
        for make in (gpt, tied_llama)
        for schedule, _ in SCHEDULES[:-1]
        for stage, storage in (
            (0, "auto"),
            *((stage, storage) for stage in (1, 2, 3) for storage in ("resident", "private")),
        )
    ],
)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("make", "schedule", "stage", "storage"), ZERO)
def test_with_zero(
    comm: Communicator, make: Callable[[], LanguageModel], schedule: str, stage: int, storage: str
) -> None:
    """The gradients are clipped, so their norm counts each parameter once."""
    model, mesh = make(), mpitrain.mesh(comm, pp=2)
    data = mesh["dp_shard"]
    plain = trained_alone(make, data.size, 0.1)
    pipe = pipeline(model, mesh["pp"], schedule, micro_batches=MICRO)
    mpitrain.fully_shard(model, mesh, stage=stage, storage=storage)  # type: ignore[arg-type]
    optimizer = adamw(model)
    for step in range(STEPS):
        tokens = batches(step, data.rank)
        total = pipe.step(tokens, last=targets(tokens)).sum()
        data.all_reduce(total)
        assert total.item() / data.size == pytest.approx(plain.losses[step], rel=1e-6)
        of_each = {name: plain.grads[step][name].norm().item() for name, _ in plain.model.named_parameters()}
        assert mpitrain.grad_norms(model) == pytest.approx(of_each, rel=1e-5)
        assert mpitrain.clip_grad_norm_(model, 0.1).item() == pytest.approx(plain.norms[step], rel=1e-6)
        optimizer.step()
        optimizer.zero_grad()
    whole = mpitrain.full_state_dict(model)
    for name, value in plain.model.state_dict().items() if comm.rank == 0 else ():
        torch.testing.assert_close(whole.pop(name), value, rtol=0, atol=2e-5)
    assert not whole
    mesh.free()


@pytest.mark.ranks(2)
def test_what_does_not_fit(comm: Communicator) -> None:
    for change, message in (
        ({"schedule": "2f2b"}, "unknown schedule '2f2b'; expected one of gpipe, 1f1b"),
        ({"micro_batches": 0}, "expected at least 1 micro-batch, got 0"),
        ({"schedule": "dualpipe-v", "micro_batches": 3}, "expected at least 2 x 2 ranks = 4 micro-batches, got 3"),
        ({"stages_per_rank": 2}, "1f1b has 1 stages on each rank, got 2"),
        ({"schedule": "interleaved", "stages_per_rank": 1}, "needs at least 2 stages on each rank, got 1"),
        ({"schedule": "interleaved", "stages_per_rank": 7}, "14 stages need at least 13 blocks, and the model has 11"),
        (
            {"division": [6]},
            r"expected the numbers of blocks of 2 stages, 11 together and not 0 in the first, got \[6\]",
        ),
        ({"division": [0, 11]}, r"not 0 in the first, got \[0, 11\]"),
        ({"micro_batches": 4 + comm.rank}, "the ranks differ: schedule 1f1b, 4 micro-batches on rank 0"),
    ):
        model = gpt()
        names = [name for name, _ in model.named_parameters()]
        with pytest.raises(ValueError, match=message):
            pipeline(model, comm, **{"micro_batches": 4, **change})  # type: ignore[arg-type]
        assert [name for name, _ in model.named_parameters()] == names
    with pytest.raises(ValueError, match="Linear brings no plan along"):
        pipeline(nn.Linear(2, 2), comm, micro_batches=4)
    pipe = pipeline(gpt(), comm, micro_batches=4)
    with pytest.raises(ValueError, match="step: expected 4 micro-batches, got 3"):
        pipe.step(batches(0)[:3])


@pytest.mark.ranks(2)
def test_gradients_of_several_steps_are_added(comm: Communicator) -> None:
    plain, model = tied_llama(), tied_llama()
    pipe = pipeline(model, comm, micro_batches=MICRO)
    for step in range(2):
        tokens = batches(step)
        for rows in tokens:
            plain(rows, rows.roll(-1, 1)).backward()
        pipe.step(tokens, last=targets(tokens))
    expected, found = plain.wte.weight.grad, model.get_parameter("wte.weight").grad
    assert expected is not None
    assert found is not None
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.ranks(2)
def test_a_division_by_numbers(comm: Communicator) -> None:
    model = gpt()
    pipe = pipeline(model, comm, micro_batches=MICRO, division=[5, 6])
    assert [*model.blocks._modules] == ([*"01234"] if comm.rank == 0 else [*"56789", "10"])
    assert hasattr(model, "wte") == (comm.rank == 0)
    assert hasattr(model, "head") == (comm.rank == 1)
    tokens = batches(0)
    assert pipe.step(tokens, last=targets(tokens)).isfinite().all()
