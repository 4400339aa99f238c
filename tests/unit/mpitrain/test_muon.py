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

ADJUSTMENTS: list[Any] = [None, "original", "match_rms_adamw"]
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


@pytest.mark.parametrize("options", [
    *({"nesterov": nesterov, "adjust_lr_fn": adjustment} for nesterov in (True, False) for adjustment in ADJUSTMENTS),
    {},  # all others of torch's own defaults
    {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 7, "momentum": 0.8, "adjust_lr_fn": None},
    {"ns_coefficients": [3, -16 / 5, 6 / 5], "adjust_lr_fn": "match_rms_adamw"},
])  # fmt: skip
def test_the_numbers_are_those_of_torch(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    matrices = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    others = [nn.Parameter(torch.randn(13)), nn.Parameter(torch.randn(()))]
    ours, theirs = copy.deepcopy((matrices, others)), (matrices, others)
    of_both: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
    both = [
        torch.optim.Muon(theirs[0], **of_both, **options),
        torch.optim.AdamW(theirs[1], **of_both, betas=(0.9, 0.95), fused=True),
    ]
    one = Muon([*ours[0], *ours[1]], **of_both, ns_dtype=torch.bfloat16, **({"adjust_lr_fn": None} | options))
    for _ in range(3):
        for mine, other in zip(itertools.chain(*ours), itertools.chain(*theirs), strict=True):
            mine.grad, other.grad = (grad := torch.randn(mine.shape)), grad.clone()
        for optimizer in (*both, one):
            optimizer.step()
    for mine, other in zip(itertools.chain(*ours), itertools.chain(*theirs), strict=True):
        assert torch.equal(mine, other), mine.shape


def test_names_of_torch_are_those_of_ours() -> None:
    """For all groups, for one group, and after a load of a state that an older version has saved."""
    for of_torch, ours in zip(ADJUSTMENTS, ["original", "original", "match_rms_adamw"], strict=True):
        params = [nn.Parameter(torch.ones(2, 3)) for _ in range(3)]
        given = {"params": params[1:2], "adjust_lr_fn": of_torch}
        one = Muon([{"params": params[:1]}, given], adjust_lr_fn="original")
        one.add_param_group({"params": params[2:], "adjust_lr_fn": of_torch, "ns_coefficients": (2, -1.5, 0.5)})
        assert [group["adjust_lr"] for group in one.param_groups] == ["original", ours, ours]
        assert given["adjust_lr_fn"] is of_torch
        assert all("adjust_lr_fn" not in group for group in one.param_groups)
        assert [group["ns_coefficients"] for group in one.param_groups] == [COEFFICIENTS] * 2 + [(2, -1.5, 0.5)]
        assert Muon(params, adjust_lr_fn=of_torch, adjust_lr=ours).defaults["adjust_lr"] == ours
    assert Muon(params).defaults["adjust_lr"] == "match_rms_adamw"
    older = one.state_dict()
    for group in older["param_groups"]:
        del group["ns_coefficients"]
    one.load_state_dict(older)
    assert [group["ns_coefficients"] for group in one.param_groups] == [COEFFICIENTS] * 3


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
        ("adjust_lr_fn is 'none'; expected None, 'original' or 'match_rms_adamw'", {"adjust_lr_fn": "none"}),
        ("adjust_lr_fn is 0; expected None, 'original' or 'match_rms_adamw'", {"adjust_lr_fn": 0}),
        (
            "adjust_lr_fn is 'match_rms_adamw', but adjust_lr is 'original'; expected one of the two",
            {"adjust_lr": "original", "adjust_lr_fn": "match_rms_adamw"},
        ),
        (r"ns_coefficients are \(1, 2\); expected three numbers", {"ns_coefficients": (1, 2)}),
        (r"ns_coefficients are 3.4; expected three numbers", {"ns_coefficients": 3.4}),
        (r"ns_coefficients are \['1', 2, 3\]; expected three numbers", {"ns_coefficients": ["1", 2, 3]}),
        (r"ns_coefficients are \(1, 2, nan\); expected three numbers", {"ns_coefficients": (1, 2, float("nan"))}),
    ]:
        with pytest.raises(ValueError, match=text) as raised:
            Muon([matrix], **options)  # type: ignore[arg-type]
        assert "\n" not in str(raised.value)
    contradiction = {"params": [matrix], "adjust_lr_fn": None, "adjust_lr": "match_rms_adamw"}
    with pytest.raises(ValueError, match="adjust_lr_fn is None, but adjust_lr is 'match_rms_adamw'; expected one"):
        Muon([contradiction])
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
