"""Which ranks hold the same rows of the same tensor. Pure arithmetic: no torch, no MPI.

Kinds of parallelism cut a tensor in different ways: a norm that `tp` ranks have whole is cut into rows by ZeRO, in each of their data
groups perhaps at other rows. So each rank says which rows it holds, and the rows of a tensor are cut wherever the rows of a rank begin
or end. No code here knows a kind of parallelism.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

Boxes = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""Boxes of a whole tensor, as (offset, shape), end to end along one dimension."""


class TensorRows(NamedTuple):
    """Rows `begin` to `end - 1` of what the boxes `of` make of the whole tensor `name`."""

    name: str
    of: Boxes
    begin: int
    end: int


class RowCopies(NamedTuple):
    """Rows that several ranks hold."""

    rows: TensorRows
    ranks: tuple[int, ...]


def common_rows(held: Sequence[Iterable[TensorRows]]) -> list[RowCopies]:
    """The rows that two or more ranks hold, in an order that all ranks compute alike. `held`: the rows of each rank."""
    by_tensor: dict[tuple[str, Boxes], list[tuple[int, int, int]]] = {}
    for rank, its in enumerate(held):
        for rows in its:
            if rows.end > rows.begin:
                by_tensor.setdefault((rows.name, rows.of), []).append((rows.begin, rows.end, rank))
    found = []
    for (name, of), ranges in by_tensor.items():
        if len({rank for _, _, rank in ranges}) == 1:
            continue
        cuts = sorted({cut for begin, end, _ in ranges for cut in (begin, end)})
        for begin, end in pairwise(cuts):
            ranks = tuple(sorted({rank for first, last, rank in ranges if first <= begin and end <= last}))
            if len(ranks) > 1:
                found.append(RowCopies(TensorRows(name, of, begin, end), ranks))
    return found


def index_in_whole(of: Boxes, index: Sequence[int]) -> tuple[int, ...]:
    """The index in the whole tensor of an element of the part that the boxes make, end to end."""
    offsets = [offset for offset, _ in of]
    dim = next((d for d in range(len(index)) if len({offset[d] for offset in offsets}) > 1), 0)
    at = index[dim] if index else 0
    for offset, shape in of:
        if not shape or at < shape[dim]:
            return tuple(offset[d] + (at if d == dim else i) for d, i in enumerate(index)) if offset else tuple(index)
        at -= shape[dim]
    raise ValueError(f"index {tuple(index)} is outside of the boxes {of}")
