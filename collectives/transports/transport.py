"""The interface of every transport of host arrays. The caller has checked the arguments; one contract suite tests them all."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np

from collectives.arrays import reduction
from collectives.arrays.dtypes import DType
from collectives.arrays.reduction import Arithmetic


class Counts(NamedTuple):
    """The number of elements of each rank's part in all_to_all: of the parts that this rank sends, and of those that it receives."""

    send: Sequence[int]
    recv: Sequence[int]

    @classmethod
    def equal(cls, length: int, size: int) -> "Counts":
        """Those of arrays of `length` elements in `size` equal parts."""
        return cls([length // size] * size, [length // size] * size)


class Transport(Protocol):
    """The collectives of a group of ranks on flat (1-D, contiguous) host arrays of the same `dtype` on all ranks.

    `op`: sum, avg, prod, max, min; for bool only max and min. `counts`: the number of elements of each rank's part.
    """

    def all_reduce(self, flat: np.ndarray, op: str, dtype: DType) -> None:
        """`flat` becomes the reduction of all ranks' `flat`, with the same bits on all ranks."""

    def reduce_scatter(self, out: np.ndarray, flat: np.ndarray, op: str, counts: Sequence[int], dtype: DType) -> None:
        """`out` becomes this rank's part of the reduction. It may be this rank's part of `flat`; otherwise `flat` does not change."""

    def all_gather(self, out: np.ndarray, flat: np.ndarray, counts: Sequence[int]) -> None:
        """`out` becomes all ranks' `flat` in order of rank. `flat` may be this rank's part of `out`."""

    def broadcast(self, flat: np.ndarray, root: int) -> None:
        """`flat` becomes the root's `flat`."""

    def reduce(self, flat: np.ndarray, op: str, root: int, dtype: DType) -> None:
        """The root's `flat` becomes the reduction; `flat` of the other ranks does not change."""

    def gather(self, out: np.ndarray | None, flat: np.ndarray, root: int) -> None:
        """The root's `out` becomes all ranks' `flat`; it already holds the root's own part. The other ranks pass None."""

    def scatter(self, out: np.ndarray, flat: np.ndarray | None, root: int) -> None:
        """`out` becomes this rank's part of the root's `flat`; the root already has its own part. The other ranks pass None."""

    def all_to_all(self, out: np.ndarray, flat: np.ndarray, counts: Counts | None = None) -> None:
        """Part i of `flat` goes to rank i, part i of `out` comes from rank i. `out` and `flat` do not overlap.

        `counts`: None if all parts have the same size; given on all ranks or on none.
        """


class Planner(Protocol):
    """An optional interface of a transport, which turns a call of the transport into a prepared call of another function."""

    def plan(self, operation: str, *arguments: Any) -> tuple[Callable[..., None], tuple[Any, ...]] | None:
        """A function and its arguments that repeat a call of the transport; None if there is none. They do not keep arrays alive."""


def parts(counts: Sequence[int]) -> list[tuple[int, int]]:
    """(begin, end) of each of the consecutive parts of `counts` elements."""
    return list(pairwise((0, *accumulate(counts))))


def even_parts(length: int, num_parts: int) -> list[tuple[int, int]]:
    """(begin, end) of `num_parts` parts of `length` elements, as equal as possible."""
    return list(pairwise(length * i // num_parts for i in range(num_parts + 1)))


def put_own_part(
    out: np.ndarray, flat: np.ndarray, counts: Sequence[int], rank: int, arithmetic: Arithmetic = reduction
) -> None:
    """Copy `flat` to its place in `out`, unless it is that place."""
    begin = sum(counts[:rank])
    mine = out[begin : begin + flat.size]
    if not np.may_share_memory(mine, flat):
        arithmetic.move(mine, flat)
