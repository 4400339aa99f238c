"""Parts of parameters: the parts of all ranks make the whole, and a box of a part is found in the whole."""

from types import SimpleNamespace
from typing import Any, cast

import torch
from hypothesis import given
from hypothesis import strategies as st

from collectives import Communicator
from mpitrain.placement import parts
from mpitrain.placement.parts import ParameterPart


def ranks(size: int) -> list[Communicator]:
    """Stand-ins with a rank and a size: all that arithmetic on parts reads."""
    return [cast(Communicator, SimpleNamespace(rank=rank, size=size)) for rank in range(size)]


@st.composite
def whole_and_parts(draw: st.DrawFn) -> tuple[torch.Tensor, list[ParameterPart]]:
    size = draw(st.integers(1, 4))
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3).filter(sum))
    shape[dim] = sum(lengths)
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    return whole, [parts.cut(shape, dim, comm, lengths=lengths) for comm in ranks(size)]


@given(whole_and_parts())
def test_parts_make_the_whole(case: tuple[torch.Tensor, list[ParameterPart]]) -> None:
    whole, of_ranks = case
    made = torch.full_like(whole, -1)
    for part in of_ranks:
        mine = part.take(whole)
        assert tuple(mine.shape) == part.shape
        at = 0
        for box in part.boxes:
            place = tuple(slice(o, o + n) for o, n in zip(*box, strict=True))
            assert (made[place] == -1).all(), "no element belongs to two ranks"
            made[place] = mine.narrow(part.dim, at, box.shape[part.dim])
            at += box.shape[part.dim]
    assert torch.equal(made, whole)


@given(whole_and_parts(), st.data())
def test_a_box_of_a_part_is_found_in_the_whole(case: tuple[torch.Tensor, list[ParameterPart]], data: Any) -> None:
    whole, of_ranks = case
    part = data.draw(st.sampled_from(of_ranks))
    mine = part.take(whole)
    offset = [data.draw(st.integers(0, n)) for n in mine.shape]
    shape = [data.draw(st.integers(0, n - o)) for n, o in zip(mine.shape, offset, strict=True)]
    held = mine[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
    seen = torch.zeros_like(held)
    for place, box in part.within(offset, shape):
        assert box.numel > 0
        seen[place] += 1
        assert torch.equal(held[place], whole[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))])
    assert (seen == 1).all()


def test_a_parameter_that_all_ranks_hold_is_one_box() -> None:
    comm = ranks(2)[1]
    part = parts.whole((3, 4), comm, is_partial=True)
    assert part.shape == (3, 4) and not part.is_first
    ((place, box),) = part.within((1, 0), (2, 4))
    assert place == (slice(0, 2), slice(None)) and box == ((1, 0), (2, 4))


def test_a_parameter_without_a_mark_is_no_part() -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    assert parts.part_of(param) is None
    part = parts.whole((2,), ranks(2)[0], is_partial=False)
    parts.mark_part(param, part)
    assert parts.part_of(param) is part
