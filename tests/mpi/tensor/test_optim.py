"""Norms, clipping, loss scaling and optimizers of a cut model, sharded or not, are those of the plain one, or an error says why not.

torch's `clip_grad_norm_` is imported before any model is cut, as scripts do.
"""

import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

import mpitrain
from collectives import Communicator, Mesh
from mpitrain.models import GPT, GPTConfig
from mpitrain.placement.parts import part_of
from mpitrain.weights.initial_values import initialize

pytestmark = pytest.mark.ranks(2)

SIZES = GPTConfig(
    vocab=51, context=8, width=24, layers=2, heads=3
)  # heads and vocabulary that two ranks cannot share equally


def plain() -> GPT:
    model = GPT(SIZES)
    initialize(model, seed=1)
    return model


@pytest.fixture
def mesh(comm: Communicator) -> Iterator[Mesh]:
    made = mpitrain.mesh(comm, tp=2)
    yield made
    made.free()


def pair(mesh: Mesh, *, sharded: bool, meta: bool = False) -> tuple[GPT, GPT]:
    """A cut model, and a plain one with the same values."""
    with torch.device("meta" if meta else "cpu"):
        model = GPT(SIZES)
    mpitrain.tensor_parallel(model, mesh["tp"])
    if sharded:
        mpitrain.fully_shard(model, mesh)
    initialize(model, seed=1)
    return model, plain()


def loss_of(model: GPT, step: int = 0) -> torch.Tensor:
    rows = torch.randint(0, SIZES.vocab, (2, 9), generator=torch.Generator().manual_seed(step))
    loss: torch.Tensor = model(rows[:, :-1], rows[:, 1:])
    return loss


def part_of_whole(mine: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole tensor; with ZeRO on one data rank a part is not cut further."""
    part = part_of(mine)
    assert part is not None
    found: torch.Tensor = part.take(whole)
    return found


def assert_same_grads(model: GPT, reference: GPT) -> None:
    for (name, mine), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert mine.grad is not None and whole.grad is not None
        expected = part_of_whole(mine, whole.grad)
        torch.testing.assert_close(mine.grad, expected, rtol=1e-4, atol=1e-6 * whole.grad.abs().max().item(), msg=name)


def norms_of(model: GPT) -> Iterator[torch.Tensor]:
    """Clips several times, to ever smaller norms; the norms before."""
    yield clip_grad_norm_(model.parameters(), 0.05)
    yield clip_grad_norm_(list(model.parameters()), 1e-3, norm_type=math.inf)
    yield clip_grad_norm_(model.blocks[0].parameters(), 1e-3, norm_type=3.0)
    yield clip_grad_norm_(model.ln_f.weight, 1e-5, norm_type=1, foreach=False)
    yield torch.nn.utils.get_total_norm([param.grad for param in model.parameters() if param.grad is not None])
    yield mpitrain.clip_grad_norm_(model, 1e-5)


@pytest.mark.parametrize(("sharded", "meta"), [(False, False), (False, True), (True, False)])
def test_norms_count_each_element_once(mesh: Mesh, sharded: bool, meta: bool) -> None:
    model, reference = pair(mesh, sharded=sharded, meta=meta)
    for each in (model, reference):
        loss_of(each).backward()
    assert mpitrain.grad_norms(model) == pytest.approx(mpitrain.grad_norms(reference), rel=1e-4, abs=1e-7)
    for ours, theirs in zip(norms_of(model), norms_of(reference), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    assert_same_grads(model, reference)


def poison(model: GPT) -> None:
    """One element of a gradient, which one rank has."""
    weight = model.blocks[0].mlp.fc.weight
    part = part_of(weight)
    if part is None or part.over.rank == 1:
        assert weight.grad is not None
        weight.grad[0, 0] = math.inf


@pytest.mark.parametrize("sharded", [False, True])
def test_a_norm_that_is_not_finite_on_one_rank(mesh: Mesh, sharded: bool) -> None:
    model, _ = pair(mesh, sharded=sharded)
    loss_of(model).backward()
    poison(model)
    with pytest.raises(RuntimeError, match="cannot be clipped"):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert not mpitrain.clip_grad_norm_(model, 1.0).isfinite()


@pytest.mark.parametrize("kind", ["torch", "ours"])
@pytest.mark.parametrize("sharded", [False, True])
def test_an_overflow_on_one_rank_skips_the_step_on_all(mesh: Mesh, sharded: bool, kind: str) -> None:
    scales: list[list[float]] = []
    models = pair(mesh, sharded=sharded)
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler: Any
        if kind == "torch":
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        else:
            scaler = mpitrain.GradScaler(model, scale=1024.0, interval=2)
        scales.append([])
        for step in range(4):
            scaler.scale(loss_of(model, step)).backward()
            if step == 1:
                poison(model)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales[-1].append(scaler.get_scale() if kind == "torch" else scaler.value)
    assert scales[0] == scales[1] == [1024, 512, 512, 1024]
    for mine, whole in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(mine, part_of_whole(mine, whole), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("sharded", [False, True])
def test_optimizers_that_need_whole_matrices(mesh: Mesh, sharded: bool) -> None:
    model, _ = pair(mesh, sharded=sharded)
    loss_of(model).backward()
    for name in ("Muon", "Adafactor", "LAMB"):
        optimizer = type(name, (torch.optim.SGD,), {})(model.parameters(), lr=0.1)
        with pytest.raises(
            TypeError, match=rf"{name} needs whole matrices.*this rank holds \(\d+, 24\) of a parameter of shape"
        ):
            optimizer.step()
    whole = type("Muon", (torch.optim.SGD,), {})(model.ln_f.parameters(), lr=0.1)
    whole.step()  # has only parameters that each rank holds whole
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        unknown = type(f"Unknown{sharded}", (torch.optim.Optimizer,), {"step": lambda self: None})
        unknown(model.parameters(), {}).step()
        torch.optim.AdamW(model.parameters()).step()
    told = [str(warning.message) for warning in caught]
    assert len(told) == (mesh.comm.rank == 0) and all("each rank updates only its own part" in text for text in told)


def test_an_optimizer_from_before(comm: Communicator) -> None:
    """It holds parameters that the model no longer has."""
    with torch.device("meta"):
        model = GPT(SIZES)
    optimizers = {"tensor_parallel": torch.optim.AdamW(model.parameters())}
    mpitrain.tensor_parallel(model, comm)
    optimizers["initialize"] = torch.optim.AdamW(model.parameters())
    initialize(model, seed=1)
    loss_of(model).backward()
    for by, optimizer in optimizers.items():
        with pytest.raises(
            RuntimeError, match=rf"AdamW holds wte\.weight from before {by}.*make the optimizer after {by}"
        ):
            optimizer.step()
    torch.optim.AdamW(model.parameters()).step()
