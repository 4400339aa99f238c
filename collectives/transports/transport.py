"""The interface of every transport of host arrays. The caller has checked the arguments; one contract suite tests them all."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np

from collectives.arrays import reduction
from collectives.arrays.dtypes import DType
from collectives.arrays.reduction import Arithmetic


class Transport(Protocol):
    """The collectives of a group of ranks on flat (1-D, contiguous) host arrays of the same `dtype` on all ranks.

    `op`: sum, avg, prod, max, min; of truth values max and min only. `counts`: the elements of each rank's part.
    """

    def all_reduce(self, flat: np.ndarray, op: str, dtype: DType) -> None:
        """`flat` becomes the reduction of all ranks' `flat`, of the same bits on all."""

    def reduce_scatter(self, out: np.ndarray, flat: np.ndarray, op: str, counts: Sequence[int], dtype: DType) -> None:
        """`out` becomes this rank's part of the reduction. It may be its own place in `flat`, which else stays as it is."""

    def all_gather(self, out: np.ndarray, flat: np.ndarray, counts: Sequence[int]) -> None:
        """`out` becomes all ranks' `flat` in order of rank. `flat` may be its own place in `out`."""

    def broadcast(self, flat: np.ndarray, root: int) -> None:
        """`flat` becomes the root's."""

    def reduce(self, flat: np.ndarray, op: str, root: int, dtype: DType) -> None:
        """The root's `flat` becomes the reduction; the others' stay as they are."""

    def gather(self, out: np.ndarray | None, flat: np.ndarray, root: int) -> None:
        """The root's `out`, None elsewhere, becomes all ranks' `flat`. The root's own part stands there already."""

    def scatter(self, out: np.ndarray, flat: np.ndarray | None, root: int) -> None:
        """`out` becomes this rank's part of the root's `flat`, None elsewhere. The root has taken its own part already."""

    def all_to_all(self, out: np.ndarray, flat: np.ndarray) -> None:
        """Part i of `flat` goes to rank i, part i of `out` comes from rank i. The two do not overlap."""


class Planner(Protocol):
    """An optional interface of a transport: a call of the transport may come to one call of another function."""

    def plan(self, operation: str, *arguments: Any) -> tuple[Callable[..., None], tuple[Any, ...]] | None:
        """The function and its arguments that repeat such a call; None if one call is not enough. The plan keeps no array alive."""


def parts(counts: Sequence[int]) -> list[tuple[int, int]]:
    """First element and end of each of the parts of `counts` elements, one after the other."""
    return list(pairwise((0, *accumulate(counts))))


def even_parts(length: int, num_parts: int) -> list[tuple[int, int]]:
    """`length` elements in parts as equal as can be."""
    return list(pairwise(length * i // num_parts for i in range(num_parts + 1)))


def put_own_part(
    out: np.ndarray, flat: np.ndarray, counts: Sequence[int], rank: int, arithmetic: Arithmetic = reduction
) -> None:
    """Copy `flat` to its place in `out`, unless it is that place."""
    begin = sum(counts[:rank])
    mine = out[begin : begin + flat.size]
    if not np.may_share_memory(mine, flat):
        arithmetic.move(mine, flat)
