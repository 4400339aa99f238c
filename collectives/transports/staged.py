"""Collectives of the ranks of one node through memory that they share: each copies a piece there, all meet, all take what they want.

[Note: ring] Each rank goes round in a ring of its own. One meeting a piece is enough: who meets for the next piece has taken everything
of this one, so a place can be written again two pieces later. The ring is longer than that needs, some times a core's own cache: a line
that the others have just read takes four times as long to write again as one that they have not looked at for a while. And it is no
longer, so that it stays in the cache that cores share, and the memory's own bandwidth goes to the callers' arrays alone. Nobody reads
its own piece there: while the others fetch the lines, that takes many times as long.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from collectives.arrays import unowned
from collectives.dtypes import DType
from collectives.reduction import reduce_into
from collectives.transports.meeting import WORDS, Meeting
from collectives.transports.memory import NodeMemory
from collectives.transports.pulls import ByPulling, Pull
from collectives.transports.transport import even_parts, parts

_RING_BYTES = 4 << 20  # of a rank
_NODE_BYTES = 64 << 20  # of all ranks of a node at most
_PIECES = 4  # that the ring has room for
# Bytes of all ranks' arrays up to which each rank adds them all: above, it pays to meet twice and add a slice each.
_ADD_ALL_BYTES = 1 << 16
_LINE = 64  # bytes of a cache line
_MAX_PLANNED_BYTES = 1 << 22  # in longer operations the time that a plan saves does not show


class Staged(ByPulling):
    """The collectives of the ranks of `mpi`, all on one node. Making it is collective. OSError if the node's memory cannot be had.

    Arrays are flat, of the same length on all ranks unless said.
    """

    def __init__(self, mpi: Any) -> None:
        self._rank, self._size = mpi.rank, mpi.size
        self._memory = NodeMemory(mpi)
        words = memoryview(self._memory.shared(8 * WORDS * mpi.size)).cast("Q")  # type: ignore[arg-type]
        self._meet = Meeting(mpi, words).meet
        piece = min(_RING_BYTES, _NODE_BYTES // mpi.size) // _PIECES
        self._piece_bytes = max(piece // _LINE, 1) * _LINE
        self._ring_bytes = _PIECES * self._piece_bytes
        self._next = 0  # byte of the ring
        self._rings: list[np.ndarray] = []  # each rank's, once it is needed, and as elements of a dtype:
        self._views: dict[np.dtype, list[np.ndarray]] = {}

    # The operations that `ByPulling` has not

    def all_reduce(self, flat: np.ndarray, op: str, dtype: DType) -> None:
        self._add(flat, op, dtype, wanted=True)

    def reduce(self, flat: np.ndarray, op: str, root: int, dtype: DType) -> None:
        self._add(flat, op, dtype, wanted=self._rank == root)

    def reduce_scatter(self, out: np.ndarray, flat: np.ndarray, op: str, counts: Sequence[int], dtype: DType) -> None:
        """Each rank adds its part of all arrays. `out` may be its own place in `flat`."""
        self.reduce_parts(flat, parts(counts), {self._rank: out}, op, dtype)

    def plan(self, operation: str, *arguments: Any) -> tuple[Callable[..., None], tuple[Any, ...]] | None:
        """An operation on short arrays as one call, which keeps none of them alive; None for long ones."""
        if any(isinstance(x, np.ndarray) and x.nbytes > _MAX_PLANNED_BYTES for x in arguments):
            return None
        return getattr(self, operation), tuple(unowned(x) if isinstance(x, np.ndarray) else x for x in arguments)

    # How they come about

    def _add(self, flat: np.ndarray, op: str, dtype: DType, *, wanted: bool) -> None:
        """The reduction of all ranks' arrays, of the same bits on all ranks, into `flat` where it is `wanted`."""
        rank, size = self._rank, self._size
        divisor = size if op == "avg" else 1
        adds_all = size <= 2 or flat.nbytes * size <= _ADD_ALL_BYTES
        width = self._piece_bytes // flat.itemsize
        for start in range(0, flat.size, width):
            piece = flat[start : start + width]
            shown = self._places(flat.dtype, piece.size)
            shown[rank][...] = piece
            shown[rank] = piece
            self._meet()
            if adds_all:
                if wanted:
                    reduce_into(piece, shown, op, dtype, divisor=divisor)
                continue
            bounds = [slice(*part) for part in even_parts(piece.size, size)]
            mine, sums = bounds[rank], self._places(flat.dtype, piece.size)
            total = piece[mine] if wanted else sums[rank][mine]
            reduce_into(total, [array[mine] for array in shown], op, dtype, divisor=divisor)
            if wanted:
                sums[rank][mine] = total
            self._meet()
            if wanted:
                for peer, part in enumerate(bounds):
                    if peer != rank:
                        piece[part] = sums[peer][part]

    def reduce_parts(
        self,
        flat: np.ndarray,
        bounds: Sequence[tuple[int, int]],
        outs: Mapping[int, np.ndarray],
        op: str,
        dtype: DType,
    ) -> None:
        """`bounds` are those of parts of `flat`: `outs` are what this rank is to have the reduction of, by number of the part."""
        divisor = self._size if op == "avg" else 1
        longest = max(end - begin for begin, end in bounds)
        # A piece holds as much of every part, so that all ranks have something to add.
        width = max(self._piece_bytes // (flat.itemsize * len(bounds)), 1)
        for start in range(0, longest, width):
            length = min(width, longest - start)
            shown = self._places(flat.dtype, length * len(bounds))
            pieces = [flat[min(begin + start, end) : min(begin + start + length, end)] for begin, end in bounds]
            for part, piece in enumerate(pieces):
                if part not in outs:
                    shown[self._rank][part * length :][: piece.size] = piece
            self._meet()
            for part, out in outs.items():
                piece = pieces[part]
                addends = [array[part * length :][: piece.size] for array in shown]
                addends[self._rank] = piece
                reduce_into(out[start : start + length], addends, op, dtype, divisor=divisor)

    def pull(self, shown: np.ndarray, pulls: Sequence[Pull], longest: int) -> None:
        width = self._piece_bytes // shown.itemsize
        for begin in range(0, longest, width):
            places = self._places(shown.dtype, min(width, longest - begin))
            piece = shown[begin : begin + width]
            places[self._rank][: piece.size] = piece
            places[self._rank] = piece
            self._meet()
            for peer, start, target in pulls:
                low, high = max(start, begin), min(start + target.size, begin + width)
                if low < high:
                    target[low - start : high - start] = places[peer][low - begin : high - begin]

    def _places(self, dtype: np.dtype, length: int) -> list[np.ndarray]:
        """Where each rank shows its next piece, of `length` elements. Collective at first."""
        if dtype not in self._views:
            if not self._rings:
                self._rings = self._memory.peers(self._memory.empty(self._ring_bytes))
            self._views[dtype] = [ring.view(dtype) for ring in self._rings]
        itemsize, begin = dtype.itemsize, self._next
        stop = begin + length * itemsize
        if stop > self._ring_bytes:
            begin, stop = 0, length * itemsize
        self._next = (stop + _LINE - 1) & -_LINE
        begin //= itemsize
        stop = begin + length
        return [ring[begin:stop] for ring in self._views[dtype]]
