"""Collectives of the ranks of one node through windows in its memory, of which each rank has two in turn.

All write a piece, meet, and take what they want from the others' windows. A window stays in the cores' caches, so the memory's own
bandwidth goes to the callers' arrays alone, and one meeting a piece is enough: who meets for the next piece has taken everything of
this one, and its window can be written again. Best for short arrays, and where cores share a cache; for long ones see shared.py.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays import unowned
from collectives.dtypes import DType
from collectives.reduction import reduce_into
from collectives.transports import pulls as exchanges
from collectives.transports.meeting import WORDS, Meeting
from collectives.transports.memory import NodeMemory
from collectives.transports.pulls import ByPulling, Pull
from collectives.transports.transport import even_parts, parts

_WINDOW_BYTES = 1 << 20  # of which two fit a core's share of the caches
# Bytes of all ranks' arrays up to which each rank adds them all: above, it pays to meet twice and add a slice each.
_ADD_ALL_BYTES = 1 << 16

Reduction = Callable[[np.ndarray, list[np.ndarray]], None]  # target, addends


class _Turn(NamedTuple):
    """What a rank does with a piece: copy to its window, meet, add, copy."""

    shows: Sequence[tuple[np.ndarray, np.ndarray]]  # target, source
    sums: Sequence[tuple[np.ndarray, list[np.ndarray]]] = ()  # target, addends
    takes: Sequence[tuple[np.ndarray, np.ndarray]] = ()  # target, source


class Staged(ByPulling):
    """The collectives of the ranks of `mpi`, all on one node. Making it is collective. OSError if the node's memory cannot be had.

    Arrays are flat, of the same length on all ranks unless said.
    """

    def __init__(self, mpi: Any) -> None:
        self._rank, self._size = mpi.rank, mpi.size
        self._own = NodeMemory(mpi)
        words = memoryview(self._own.shared(8 * WORDS * mpi.size)).cast("Q")  # type: ignore[arg-type]
        self._meet = Meeting(mpi, words).meet
        self._turn = 0  # whose windows are next
        self._memories: list[list[np.ndarray]] = []  # each rank's windows of both turns, and as elements of a dtype:
        self._windows: dict[np.dtype, list[list[np.ndarray]]] = {}

    # The operations

    def all_reduce(self, flat: np.ndarray, op: str, dtype: DType) -> None:
        self._run(self._add(flat), self._reduction(op, dtype))

    def reduce(self, flat: np.ndarray, op: str, root: int, dtype: DType) -> None:
        self._run(self._add(flat, wanted=self._rank == root), self._reduction(op, dtype))

    def reduce_scatter(self, out: np.ndarray, flat: np.ndarray, op: str, counts: Sequence[int], dtype: DType) -> None:
        """Each rank adds its part of all arrays. `out` may be its own place in `flat`."""
        self.reduce_parts(flat, parts(counts), {self._rank: out}, op, dtype)

    def reduce_parts(
        self,
        flat: np.ndarray,
        bounds: Sequence[tuple[int, int]],
        outs: Mapping[int, np.ndarray],
        op: str,
        dtype: DType,
    ) -> None:
        """`bounds` are those of parts of `flat`: `outs` are what this rank is to have the reduction of, by number of the part."""
        self._run(self._add_parts(flat, bounds, outs), self._reduction(op, dtype))

    def pull(self, shown: np.ndarray, pulls: Sequence[Pull], longest: int) -> None:
        self._run(self._take(shown, pulls, longest))

    def plan(self, operation: str, *arguments: Any) -> tuple[Callable[..., None], tuple[Any, ...]] | None:
        """An operation on short private arrays as one prepared call, which keeps none of them alive; None where there is no such.

        `all_gather` and `reduce_scatter` with equal counts and not in place.
        """
        if any(isinstance(x, np.ndarray) and x.nbytes > _WINDOW_BYTES for x in arguments):
            return None  # the time that a plan saves does not show
        arguments = tuple(unowned(x) if isinstance(x, np.ndarray) else x for x in arguments)
        reduction = None
        match operation, arguments:
            case "all_reduce", (flat, op, dtype):
                turns, reduction = partial(self._add, flat), self._reduction(op, dtype)
            case "reduce_scatter", (out, flat, op, counts, dtype):
                turns = partial(self._add_parts, flat, parts(counts), {self._rank: out})
                reduction = self._reduction(op, dtype)
            case "all_gather", (out, flat, counts):
                turns = partial(self._take, *exchanges.all_gather(self._rank, out, flat, counts))
            case "broadcast", (flat, root):
                turns = partial(self._take, *exchanges.broadcast(self._rank, flat, root))
            case _:
                return None
        prepared, next_turn = [], self._turn
        for self._turn in (0, 1):
            prepared.append(list(turns()))
        self._turn = next_turn
        return self._run_prepared, (prepared, len(prepared[0]) % 2, reduction)

    # How they come about

    def _reduction(self, op: str, dtype: DType) -> Reduction:
        return partial(reduce_into, op=op, dtype=dtype, divisor=self._size if op == "avg" else 1)

    def _run(self, turns: Iterable[_Turn], reduction: Reduction | None = None) -> None:
        meet = self._meet
        for shows, sums, takes in turns:
            for target, source in shows:
                target[...] = source
            meet()
            for target, addends in sums:
                reduction(target, addends)  # type: ignore[misc]  # there is one where there are sums
            for target, source in takes:
                target[...] = source

    def _run_prepared(self, prepared: Sequence[Sequence[_Turn]], flips: int, reduction: Reduction | None) -> None:
        """Turns that were prepared for each of the windows that may be next, of which there is an odd number if `flips`."""
        turn = self._turn
        self._turn = turn ^ flips
        self._run(prepared[turn], reduction)

    def _add(self, flat: np.ndarray, *, wanted: bool = True) -> Iterator[_Turn]:
        """The reduction of all ranks' arrays, of the same bits on all ranks, into `flat` where it is `wanted`."""
        rank = self._rank
        adds_all = self._size <= 2 or flat.nbytes * self._size <= _ADD_ALL_BYTES
        width = _WINDOW_BYTES // flat.itemsize
        for start in range(0, flat.size, width):
            piece = flat[start : start + width]
            shown = [window[: piece.size] for window in self._next_windows(flat.dtype)]
            if adds_all:
                yield _Turn([(shown[rank], piece)], sums=[(piece, shown)] if wanted else ())
                continue
            begin, end = even_parts(piece.size, self._size)[rank]
            sums = [window[: piece.size] for window in self._next_windows(flat.dtype)]
            yield _Turn([(shown[rank], piece)], sums=[(sums[rank][begin:end], [array[begin:end] for array in shown])])
            bounds = [slice(*part) for part in even_parts(piece.size, self._size)]
            yield _Turn(
                (), takes=[(piece[part], sums[peer][part]) for peer, part in enumerate(bounds)] if wanted else ()
            )

    def _add_parts(
        self, flat: np.ndarray, bounds: Sequence[tuple[int, int]], outs: Mapping[int, np.ndarray]
    ) -> Iterator[_Turn]:
        """A window holds as much of every part, so that all ranks have something to add."""
        width = _WINDOW_BYTES // (flat.itemsize * len(bounds))
        for start in range(0, max(end - begin for begin, end in bounds), width):
            windows = self._next_windows(flat.dtype)
            shows, sums = [], []
            for part, (begin, end) in enumerate(bounds):
                piece = flat[min(begin + start, end) : min(begin + start + width, end)]
                shown = [window[part * width :][: piece.size] for window in windows]
                if part not in outs:
                    shows.append((shown[self._rank], piece))
                else:
                    shown[self._rank] = piece
                    sums.append((outs[part][start : start + width], shown))
            yield _Turn(shows, sums)

    def _take(self, shown: np.ndarray, pulls: Sequence[Pull], longest: int) -> Iterator[_Turn]:
        width = _WINDOW_BYTES // shown.itemsize
        for begin in range(0, longest, width):
            windows = self._next_windows(shown.dtype)
            piece = shown[begin : begin + width]
            takes = []
            for peer, start, target in pulls:
                low, high = max(start, begin), min(start + target.size, begin + width)
                if low < high:
                    takes.append((target[low - start : high - start], windows[peer][low - begin : high - begin]))
            yield _Turn([(windows[self._rank][: piece.size], piece)] if piece.size else (), takes=takes)

    def _next_windows(self, dtype: np.dtype) -> list[np.ndarray]:
        """Each rank's window of the next turn, as elements of `dtype`. Collective at first."""
        views = self._windows.get(dtype)
        if views is None:
            if not self._memories:
                self._memories = [self._own.peers(self._own.empty(_WINDOW_BYTES)) for _ in range(2)]
            views = self._windows[dtype] = [[memory.view(dtype) for memory in turn] for turn in self._memories]
        turn = self._turn
        self._turn = turn ^ 1
        return views[turn]
