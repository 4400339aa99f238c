"""Norms, clips and scalers of models with parameters that only some ranks hold, such as ignored ones, are those of one process."""

import copy
import math
from collections.abc import Callable
from math import prod

import pytest
import torch
from torch import nn

import mpitrain
from collectives import Communicator
from mpitrain.models import GPT, GPTConfig
from tests.helpers.ways import mesh_of

TOKENS = torch.arange(16).view(4, 4) * 5 % 23
MICRO = 2
EARLY = ("wte.", "wpe.", "blocks.0.", "blocks.1.")  # the first of two stages

Chosen = Callable[[str], bool]


def spread_over(
    comm: Communicator, axes: dict[str, int], ignored: Chosen, is_frozen: Chosen = lambda name: False, stage: int = 3
) -> tuple[nn.Module, nn.Module]:
    """A model and its plain copy, both with the gradients of the same batch."""
    torch.manual_seed(0)
    plain = GPT(GPTConfig(vocab=23, context=4, width=8, layers=4, heads=2, tied=False))
    for name, param in plain.named_parameters():
        param.requires_grad_(not is_frozen(name))
    model = copy.deepcopy(plain)
    mesh = mesh_of(comm, *axes.items())
    if axes["tp"] > 1:
        mpitrain.tensor_parallel(model, mesh["tp"])
    pipe = mpitrain.pipeline(model, mesh["pp"], micro_batches=MICRO, division=[2, 2]) if axes["pp"] > 1 else None
    mpitrain.fully_shard(
        model, mesh, stage=stage, ignored_params=[param for name, param in model.named_parameters() if ignored(name)]
    )
    plain(TOKENS, TOKENS.roll(-1, 1)).backward()
    if pipe is None:
        model(TOKENS, TOKENS.roll(-1, 1)).backward()
    else:
        micros = TOKENS.chunk(MICRO)
        pipe.step(micros, last=[{"targets_BL": each.roll(-1, 1)} for each in micros], scale=lambda loss: loss / MICRO)
    return model, plain


def axes_of(comm: Communicator, **sizes: int) -> dict[str, int]:
    return {"pp": 1, "dp_replicate": 1, "dp_shard": comm.size // prod(sizes.values()), "tp": 1} | sizes


def is_first(name: str) -> bool:
    """In the first stage alone."""
    return name == "wte.weight"


def is_in_blocks(name: str) -> bool:
    """Some of these are cut by `tensor_parallel`."""
    return name.endswith(("bias", "fc.weight"))


CASES: dict[int, list[tuple[dict[str, int], Chosen]]] = {
    2: [
        ({}, is_in_blocks), ({"dp_replicate": 2}, is_first), ({"pp": 2}, is_first), ({"pp": 2}, is_in_blocks),
        ({"tp": 2}, is_first), ({"tp": 2}, is_in_blocks),
    ],
    4: [({"pp": 2}, is_in_blocks), ({"pp": 2, "tp": 2}, is_in_blocks), ({"pp": 2, "dp_replicate": 2}, is_first)],
}  # fmt: skip


@pytest.mark.rest
@pytest.mark.ranks(2, 4)
def test_ignored_parameters(comm: Communicator) -> None:
    for sizes, ignored in CASES[comm.size]:
        model, plain = spread_over(comm, axes_of(comm, **sizes), ignored)
        check_norms(model, plain)
        for param in model.parameters():
            if param.grad is not None:
                param.grad.fill_(math.inf)
        assert set(mpitrain.grad_norms(model).values()) == {math.inf}, (
            "no 0 times infinity on a rank that does not count"
        )


def check_norms(model: nn.Module, plain: nn.Module) -> None:
    expected = {name: param.grad.norm().item() for name, param in plain.named_parameters() if param.grad is not None}
    assert mpitrain.grad_norms(model) == pytest.approx(expected, rel=1e-4, abs=1e-7)
    grads = [[param.grad for param in each.parameters() if param.grad is not None] for each in (model, plain)]
    for order in (2.0, 1.0, math.inf):
        found, norm = (nn.utils.get_total_norm(each, order).item() for each in grads)
        assert found == pytest.approx(norm, rel=1e-5)
    for bound, clip in ((0.1, mpitrain.clip_grad_norm_), (0.01, nn.utils.clip_grad_norm_)):
        tensors = model if clip is mpitrain.clip_grad_norm_ else model.parameters()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), bound).item()
        assert clip(tensors, bound).item() == pytest.approx(norm, rel=1e-5)  # type: ignore[arg-type]
    assert mpitrain.clip_grad_norm_(model, 1.0).item() == pytest.approx(0.01, rel=1e-4)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_frozen_stage(comm: Communicator, stage: int) -> None:
    """It has no gradient, and takes part in the norms of the others."""
    model, plain = spread_over(
        comm, axes_of(comm, pp=2), lambda name: name == "head.weight", lambda name: name.startswith(EARLY), stage
    )
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1).item()
    assert nn.utils.clip_grad_norm_(model.parameters(), 0.1).item() == pytest.approx(norm, rel=1e-5)
    assert mpitrain.clip_grad_norm_(model, 1.0).item() == pytest.approx(0.1, rel=1e-4)
    assert nn.utils.clip_grad_norm_(list(model.parameters()), 1.0, math.inf).item() > 0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_with_other_gradients_clip_alike(comm: Communicator, stage: int) -> None:
    """Nothing reduces the gradient of an ignored parameter. That of the first data rank counts, so all ranks have one norm."""
    model, _ = spread_over(comm, axes_of(comm), lambda name: name == "head.weight", stage=stage)
    head = model.get_parameter("head.weight")
    assert head.grad is not None
    alike = mpitrain.clip_grad_norm_(model, math.inf)
    head.grad *= 1 + comm.rank
    assert mpitrain.clip_grad_norm_(model, math.inf) == alike
    assert nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item() == pytest.approx(
        alike
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "without"), [(0, 1), (3, 1), (3, 0)])
def test_an_ignored_parameter_that_one_rank_has_not_used(comm: Communicator, stage: int, without: int) -> None:
    """It has no gradient there. In torch's function the other rank waited for this one."""
    model, plain = spread_over(comm, axes_of(comm), lambda name: name == "head.weight", stage=stage)
    if comm.rank == without:
        model.get_parameter("head.weight").grad = None
    if without == 0:
        plain.get_parameter("head.weight").grad = None  # that of the first data rank counts
    bounds: dict[float, float] = {2.0: 0.5, 1.0: 0.25, math.inf: 0.001}
    for order, bound in bounds.items():
        norm = nn.utils.clip_grad_norm_(plain.parameters(), bound, order).item()
        found = nn.utils.clip_grad_norm_(model.parameters(), bound, order).item()
        assert comm.all_gather_object(found) == pytest.approx([norm] * 2, rel=1e-5)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sizes", [{}, {"pp": 2}], ids=str)
def test_an_overflow_on_one_rank(comm: Communicator, sizes: dict[str, int]) -> None:
    """In an ignored parameter that other stages do not have."""
    for scaler_of in (mpitrain.GradScaler, lambda model: torch.amp.GradScaler("cpu", init_scale=1.0)):
        model, _ = spread_over(comm, axes_of(comm, **sizes), lambda name: name == "wte.weight")
        optimizer = mpitrain.optim.SGD(model.parameters(), lr=0.1)
        before = [param.detach().clone() for param in model.parameters()]
        scaler = scaler_of(model)
        scaler.scale(torch.zeros(()))
        if comm.rank == 0:
            grad = model.get_parameter("wte.weight").grad
            assert grad is not None
            grad[0, 0] = math.inf
        scaler.step(optimizer)
        assert all(torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))
