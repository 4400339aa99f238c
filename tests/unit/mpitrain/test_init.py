"""Initial values: the same bits for every way of cutting a parameter into boxes of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mpitrain.placement.fills import BLOCK, Constant, Init, Normal, fill_
from mpitrain.weights.initial_values import initialize


def whole(
    shape: tuple[int, ...], *, seed: int = 0, name: str = "w", dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    tensor = torch.full(shape, math.nan, dtype=dtype)
    fill_(tensor, Normal(0.02), seed=seed, name=name)
    return tensor


@settings(deadline=None, max_examples=60)
@given(
    lead=st.integers(0, 2),
    rows=st.integers(2, 700),
    inner=st.lists(st.integers(1, 40), max_size=2),
    cuts=st.lists(st.integers(0, 700), max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_any_split_of_rows_gives_the_bits_of_the_whole(
    lead: int, rows: int, inner: list[int], cuts: list[int], dtype: torch.dtype
) -> None:
    ones = (1,) * lead
    shape = (*ones, rows, *inner)
    edges = sorted([0, rows, *(min(c, rows) for c in cuts)])
    boxes = []
    for begin, end in pairwise(edges):
        box = torch.full((*ones, end - begin, *inner), math.nan, dtype=dtype)
        offset = (*(0,) * lead, begin, *(0,) * len(inner))
        fill_(box, Normal(0.02), seed=3, name="w", shape=shape, offset=offset)
        boxes.append(box)
    assert torch.equal(torch.cat(boxes, dim=lead), whole(shape, seed=3, dtype=dtype))


def test_rows_across_the_edges_of_blocks() -> None:
    shape = (7, BLOCK // 2 + 1)
    full = whole(shape)
    for begin in range(7):
        for end in range(begin, 8):
            box = torch.empty(end - begin, shape[1])
            fill_(box, Normal(0.02), seed=0, name="w", shape=shape, offset=(begin, 0))
            assert torch.equal(box, full[begin:end])


def test_values_are_normal_and_differ_by_seed_name_and_block() -> None:
    values = whole((4, BLOCK))
    # 262144 draws: the mean's deviation is 0.02 / 512 = 4e-5, that of the standard deviation 2.8e-5; 5 of each.
    assert abs(values.mean().item()) < 2e-4
    assert abs(values.std().item() - 0.02) < 1.5e-4
    assert values.unique().numel() > 0.9 * values.numel()
    for other in (whole((4, BLOCK), seed=1), whole((4, BLOCK), name="v"), values.roll(1, 0)):
        assert not (other == values).float().mean() > 0.01


def test_the_values_stay_what_they_are() -> None:
    # Runs are compared across versions of this code: these digits change only on purpose.
    expected = torch.tensor([-0.015280389, -0.0066949073, 0.020670626, 0.018403206])
    torch.testing.assert_close(whole((4,), seed=0, name="wte.weight"), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (1, 1), (0, 4)])
def test_small_shapes(shape: tuple[int, ...]) -> None:
    tensor = whole(shape)
    assert tensor.isfinite().all()
    if tensor.numel():
        assert tensor.item() == whole((5,))[0].item()


def test_constant_and_dtype_of_the_tensor() -> None:
    tensor = torch.empty(3, 5, dtype=torch.bfloat16)
    fill_(tensor, Constant(1.5), seed=0, name="w")
    assert (tensor == 1.5).all()


def test_a_tensor_that_is_not_contiguous_gets_the_same_values() -> None:
    tensor = torch.empty(5, 3).t()
    fill_(tensor, Normal(0.02), seed=0, name="w")
    assert torch.equal(tensor, whole((3, 5)))


@pytest.mark.parametrize(
    ("box", "shape", "offset"),
    [
        ((2, 3), (4, 4), (0, 0)),  # not whole rows
        ((2, 4), (4, 4), (3, 0)),  # past the end
        ((2, 4), (4, 4), (-1, 0)),
        ((2, 4), (4, 4), (0, 1)),
        ((4,), (4, 4), (0, 0)),
        ((2, 4), (4, 4), (0,)),
        ((1, 2), (2, 2), (0, 0, 0)),
        ((2,), (), ()),
    ],
)
def test_boxes_that_do_not_fit(box: tuple[int, ...], shape: tuple[int, ...], offset: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="'w': expected a box of whole rows"):
        fill_(torch.empty(box), Normal(1), seed=0, name="w", shape=shape, offset=offset)


def test_meta_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="'w' is on the meta device"):
        fill_(torch.empty(2, device="meta"), Normal(1), seed=0, name="w")


class Pair(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6, bias=False)
        self.b.weight = self.a.weight

    def init_rule(self, name: str) -> Init:
        return Constant(0.0) if name.endswith("bias") else Normal(0.5)


@dataclass(frozen=True)
class Box:
    full_shape: tuple[int, ...]
    offset: tuple[int, ...]


def test_initialize_draws_tied_parameters_once_under_their_first_name() -> None:
    model = Pair()
    initialize(model, seed=4)
    expected = torch.empty(6, 6)
    fill_(expected, Normal(0.5), seed=4, name="a.weight")
    assert torch.equal(model.a.weight, expected)
    assert model.b.weight is model.a.weight
    assert (model.a.bias == 0).all()
    assert model.a.weight.requires_grad and model.a.weight.is_leaf


def test_initialize_fills_a_shard_by_its_box() -> None:
    full, sharded = Pair(), Pair()
    initialize(full, seed=4)
    shard = nn.Parameter(torch.empty(2, 6))
    shard.shard_box = Box((6, 6), (3, 0))  # type: ignore[attr-defined]
    sharded.a.weight = sharded.b.weight = shard
    initialize(sharded, seed=4)
    assert torch.equal(shard, full.a.weight[3:5])


def test_initialize_needs_a_rule() -> None:
    with pytest.raises(TypeError, match="Linear has no init_rule"):
        initialize(nn.Linear(2, 2))
    model = nn.Linear(2, 2)
    initialize(model, lambda name: Constant(2.0))
    assert (model.weight == 2).all() and (model.bias == 2).all()
