"""Muon on one rank, Newton-Schulz, and the division of matrices among ranks."""

import copy
import itertools
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim._muon import _zeropower_via_newtonschulz

from mpitrain.models import GPT, GPTConfig, muon_groups
from mpitrain.optim import Muon
from mpitrain.optim.newton_schulz import COEFFICIENTS, EPS, cost, newton_schulz
from mpitrain.optim.owners import Matrix, assign, routes
from mpitrain.placement.parts import Box

SHAPES = [(96, 32), (32, 96), (64, 64), (7, 50), (130, 33), (1, 12), (12, 1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_newton_schulz(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    kept = matrix.clone()
    reference = _zeropower_via_newtonschulz(matrix, COEFFICIENTS, 5, EPS)
    assert torch.equal(newton_schulz(matrix, 5, torch.bfloat16), reference)
    values = torch.linalg.svdvals(newton_schulz(matrix, 7, torch.float32))
    assert values.min() > 0.3 and values.max() < 1.3
    assert torch.equal(matrix, kept)
    assert not newton_schulz(torch.zeros(shape), 5, torch.float32).any()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
def test_the_numbers_are_those_of_torch(nesterov: bool, adjust_lr: Any) -> None:
    torch.manual_seed(0)
    matrices = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    others = [nn.Parameter(torch.randn(13)), nn.Parameter(torch.randn(()))]
    ours, theirs = copy.deepcopy((matrices, others)), (matrices, others)
    options: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
    both = [
        torch.optim.Muon(theirs[0], **options, nesterov=nesterov, adjust_lr_fn=adjust_lr),
        torch.optim.AdamW(theirs[1], **options, betas=(0.9, 0.95), fused=True),
    ]
    one = Muon([*ours[0], *ours[1]], **options, ns_dtype=torch.bfloat16, nesterov=nesterov, adjust_lr=adjust_lr)
    for _ in range(3):
        for mine, other in zip(itertools.chain(*ours), itertools.chain(*theirs), strict=True):
            mine.grad, other.grad = (grad := torch.randn(mine.shape)), grad.clone()
        for optimizer in (*both, one):
            optimizer.step()
    for mine, other in zip(itertools.chain(*ours), itertools.chain(*theirs), strict=True):
        assert torch.equal(mine, other), mine.shape


def test_groups_of_a_model() -> None:
    """Embeddings and heads, also tied ones, go to AdamW; convolutions count as matrices."""
    for tied in (True, False):
        model = GPT(GPTConfig(vocab=17, context=8, width=12, layers=1, heads=2, tied=tied))
        names = {id(param): name for name, param in model.named_parameters()}
        matrices, tables, others = ([names[id(p)] for p in group["params"]] for group in muon_groups(model, 0.1))
        assert matrices == [f"blocks.0.{name}.weight" for name in ("attn.qkv", "attn.proj", "mlp.fc", "mlp.proj")]
        assert tables == ["wte.weight", "wpe.weight"] + ["head.weight"] * (not tied)
        assert len(matrices) + len(tables) + len(others) == len(names)
    kernel, flat = nn.Parameter(torch.ones(3, 5, 2, 2)), nn.Parameter(torch.ones(3, 20))
    kernel.grad = torch.randn(kernel.shape)
    flat.grad = kernel.grad.view(3, 20).clone()
    Muon([kernel, flat]).step()
    assert torch.equal(kernel.view(3, 20), flat)


def test_wrong_settings() -> None:
    matrix, vector = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3))
    for text, options in [
        ("lr is -1; expected a number from 0", {"lr": -1}),
        ("momentum is 1.0; expected", {"momentum": 1.0}),
        ("betas are", {"betas": (0.9, 1.0)}),
        ("ns_steps is 0; expected an integer of at least 1", {"ns_steps": 0}),
        ("ns_dtype is 'int8'; expected one of auto, float32", {"ns_dtype": torch.int8}),
        ("adjust_lr is 'none'; expected one of match_rms_adamw, original", {"adjust_lr": "none"}),
    ]:
        with pytest.raises(ValueError, match=text):
            Muon([matrix], **options)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"a parameter of shape \(3,\) and torch.float32 is in a group with use_muon=True"
    ):
        Muon([{"params": [matrix, vector], "use_muon": True}])


@st.composite
def matrices(draw: st.DrawFn) -> tuple[list[Matrix], int]:
    """Matrices whose rows are cut among ranks in any place. Each row has one holder, or several."""
    num_ranks, found = draw(st.integers(1, 5)), []
    for _ in range(draw(st.integers(0, 6))):
        rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 4))
        num_cuts, copies = draw(st.sampled_from([(num_ranks, 1), (1, num_ranks)]))
        cuts = [0, *sorted(draw(st.lists(st.integers(0, rows), min_size=num_cuts - 1, max_size=num_cuts - 1))), rows]
        boxes = [Box((begin, 0), (end - begin, columns)) for begin, end in itertools.pairwise(cuts)]
        held = tuple(tuple(box for box in (boxes * copies)[rank : rank + 1] if box.numel) for rank in range(num_ranks))
        found.append(Matrix((rows, columns), cost(rows, columns), held))
    return found, num_ranks


@given(matrices())
def test_owners_have_about_the_same_work_and_get_what_they_need(case: tuple[list[Matrix], int]) -> None:
    its, num_ranks = case
    owners = assign(its, num_ranks)
    loads = [
        sum(matrix.cost for matrix, owner in zip(its, owners, strict=True) if owner == r) for r in range(num_ranks)
    ]
    assert max(loads) - min(loads) <= max((matrix.cost for matrix in its), default=0)
    paths = [routes(its, owners, rank, num_ranks) for rank in range(num_ranks)]
    for one, other in itertools.product(range(num_ranks), repeat=2):
        assert paths[one].sends[other] == paths[other].receives[one]
        assert paths[one].returns[other] == paths[other].gets_back[one]
    for index, (matrix, owner) in enumerate(zip(its, owners, strict=True)):
        assert matrix.is_complete
        arrives = [box for of, box in itertools.chain(paths[owner].own, *paths[owner].receives) if of == index]
        assert sum(box.numel for box in arrives) == prod(matrix.shape) and len(set(arrives)) == len(arrives)
        for rank in range(num_ranks):
            back = [box for of, box in itertools.chain(*paths[rank].gets_back) if of == index]
            assert set(back) == (set() if rank == owner else set(matrix.held[rank]))
