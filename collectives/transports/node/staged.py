"""Collectives of the ranks of one node through node memory: each rank copies a piece there, all meet, all copy the pieces they need.

[Note: ring] Each rank writes its pieces to its own ring. One meeting for each piece is enough: a rank that meets for the next piece has
finished reading this one, so its place can be written again two pieces later. The ring has room for two pieces of the greatest length.
It stays in the cache that cores share, so only the callers' arrays use memory bandwidth. Short pieces use the whole ring in turn: to
overwrite a cache line takes up to four times as long if other cores have just read it. A rank reads its own piece from its array, not
from the ring: while other cores fetch the lines, that read takes many times as long.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays.buffer import unowned
from collectives.arrays.dtypes import DType
from collectives.arrays.reduction import reduce_into
from collectives.transports.node import pulls as exchanges
from collectives.transports.node.meeting import WORDS, NodeMeeting
from collectives.transports.node.memory import NodeMemory
from collectives.transports.node.pulls import ByPulling, Pull
from collectives.transports.transport import even_parts, parts

_RING_BYTES = 2 << 20  # of one rank
_NODE_BYTES = 64 << 20  # the most for all ranks of a node
_PIECES = 2  # pieces of the greatest length in a ring
# Up to this sum of all ranks' arrays each rank adds whole arrays. Above it each rank adds a slice, which takes a second meeting. Two
# ranks always add whole arrays, because slices would save no reads; but not in fp16 and bf16, whose addition costs more than reads.
_ADD_ALL_BYTES = 1 << 16
_LINE = 64  # bytes of a cache line
_PLANNED_BYTES = 1 << 21  # in longer operations the time saved by a plan is negligible
_PLACES = 64  # places in the ring where a piece may begin: few, because a plan keeps prepared turns for each place


def ring_bytes(size: int) -> int:
    """The node memory of the ring of each of `size` ranks, in bytes; one rank has none."""
    return min(_RING_BYTES, _NODE_BYTES // size) if size > 1 else 0


Reduction = Callable[[np.ndarray, list[np.ndarray]], None]  # target, addends


class _Turn(NamedTuple):
    """The work of a rank for one piece: copy to the ring, meet, add, copy from the ring."""

    shows: Sequence[tuple[np.ndarray, np.ndarray]]  # target, source
    sums: Sequence[tuple[np.ndarray, list[np.ndarray]]] = ()  # target, addends
    takes: Sequence[tuple[np.ndarray, np.ndarray]] = ()  # target, source


class Staged(ByPulling):
    """The collectives of the ranks of `mpi`, all on one node. Making it is collective. OSError if node memory cannot be allocated.

    Arrays are flat and have the same length on all ranks unless stated otherwise.
    """

    def __init__(self, mpi: Any) -> None:
        self._rank, self._size = mpi.rank, mpi.size
        self._memory = NodeMemory(mpi)
        board = self._memory.shared(8 * WORDS * mpi.size, or_anonymous=True)
        self._meet = NodeMeeting(mpi, memoryview(board).cast("Q")).meet  # type: ignore[arg-type]
        self._step = self._ring_bytes = 0  # bytes from place to place, and of a ring
        self._next = 0  # byte of the ring where the next piece may begin; the same on all ranks
        self._rings: list[np.ndarray] = []  # all ranks' rings, allocated at the first use
        self._views: dict[np.dtype, list[np.ndarray]] = {}  # the rings as elements of a dtype
        # Ranks that will have no rings must know it now, and use other algorithms.
        self._memory.check_room(ring_bytes(mpi.size) * mpi.size)

    # The operations that are not in `ByPulling`

    def all_reduce(self, flat: np.ndarray, op: str, dtype: DType) -> None:
        self._run(self._add(flat, dtype, wanted=True), self._reduction(op, dtype))

    def reduce(self, flat: np.ndarray, op: str, root: int, dtype: DType) -> None:
        self._run(self._add(flat, dtype, wanted=self._rank == root), self._reduction(op, dtype))

    def reduce_scatter(self, out: np.ndarray, flat: np.ndarray, op: str, counts: Sequence[int], dtype: DType) -> None:
        """Each rank adds its part of all arrays. `out` may be this rank's part of `flat`."""
        self.reduce_parts(flat, parts(counts), {self._rank: out}, op, dtype)

    def reduce_parts(
        self,
        flat: np.ndarray,
        bounds: Sequence[tuple[int, int]],
        outs: Mapping[int, np.ndarray],
        op: str,
        dtype: DType,
    ) -> None:
        """`bounds`: of the parts of `flat`. `outs`: by the number of a part, the arrays into which this rank reduces that part."""
        self._run(self._add_parts(flat, bounds, outs), self._reduction(op, dtype))

    def pull(self, shown: np.ndarray, pulls: Sequence[Pull], longest: int) -> None:
        self._run(self._take(shown, pulls, longest))

    def plan(self, operation: str, *arguments: Any) -> tuple[Callable[..., None], tuple[Any, ...]] | None:
        """An operation on short arrays as one prepared call, which does not keep the arrays alive; None for other operations.

        `all_gather` and `reduce_scatter` need equal counts and may not be in place.
        """
        if any(isinstance(x, np.ndarray) and x.nbytes > _PLANNED_BYTES for x in arguments):
            return None
        arguments = tuple(unowned(x) if isinstance(x, np.ndarray) else x for x in arguments)
        reduction = None
        match operation, arguments:
            case "all_reduce", (flat, op, dtype):
                turns, reduction = partial(self._add, flat, dtype, wanted=True), self._reduction(op, dtype)
            case "reduce_scatter", (out, flat, op, counts, dtype):
                turns = partial(self._add_parts, flat, parts(counts), {self._rank: out})
                reduction = self._reduction(op, dtype)
            case "all_gather", (out, flat, counts):
                turns = partial(self._take, *exchanges.all_gather(self._rank, out, flat, counts))
            case "broadcast", (flat, root):
                turns = partial(self._take, *exchanges.broadcast(self._rank, flat, root))
            case _:
                return None
        return self._run_prepared, ({}, turns, reduction)

    # Helpers

    def _reduction(self, op: str, dtype: DType) -> Reduction:
        return partial(reduce_into, op=op, dtype=dtype, divisor=self._size if op == "avg" else 1)

    def _run(self, turns: Iterable[_Turn], reduction: Reduction | None = None) -> None:
        meet = self._meet
        for shows, sums, takes in turns:
            for target, source in shows:
                target[...] = source
            meet()
            for target, addends in sums:
                reduction(target, addends)  # type: ignore[misc]  # not None if there are sums
            for target, source in takes:
                target[...] = source

    def _run_prepared(
        self,
        prepared: dict[int, tuple[list[_Turn], int]],
        turns: Callable[[], Iterable[_Turn]],
        reduction: Reduction | None,
    ) -> None:
        """Run the turns. `prepared`: for each place in the ring where they may begin, the turns and the place where they end."""
        begin = self._next
        if begin not in prepared:
            prepared[begin] = list(turns()), self._next
        made, self._next = prepared[begin]
        self._run(made, reduction)

    def _add(self, flat: np.ndarray, dtype: DType, *, wanted: bool) -> Iterator[_Turn]:
        """The turns that reduce all ranks' arrays into `flat`, with the same bits on all ranks; only if `wanted`."""
        rank, size = self._rank, self._size
        adds_all = (size <= 2 and not dtype.is_half) or flat.nbytes * size <= _ADD_ALL_BYTES
        for start, length in self._pieces(flat.size, flat.itemsize):
            piece = flat[start : start + length]
            shown = self._places(flat.dtype, length)
            place, shown[rank] = shown[rank], piece
            if adds_all:
                yield _Turn([(place, piece)], sums=[(piece, shown)] if wanted else ())
                continue
            bounds = [slice(*part) for part in even_parts(length, size)]
            mine, others = bounds[rank], (slice(bounds[rank].start), slice(bounds[rank].stop, None))
            sums = self._places(flat.dtype, length)
            total = piece[mine] if wanted else sums[rank][mine]
            yield _Turn(
                [(place[part], piece[part]) for part in others], sums=[(total, [array[mine] for array in shown])]
            )
            yield _Turn(
                [(sums[rank][mine], total)] if wanted else (),
                takes=[(piece[part], sums[peer][part]) for peer, part in enumerate(bounds) if peer != rank and wanted],
            )

    def _add_parts(
        self, flat: np.ndarray, bounds: Sequence[tuple[int, int]], outs: Mapping[int, np.ndarray]
    ) -> Iterator[_Turn]:
        """The turns of `reduce_parts`. A piece holds as many elements of every part, so that all ranks have elements to add."""
        longest = max(end - begin for begin, end in bounds)
        for start, length in self._pieces(longest, flat.itemsize * len(bounds)):
            places = self._places(flat.dtype, length * len(bounds))
            shows, sums = [], []
            for part, (begin, end) in enumerate(bounds):
                piece = flat[min(begin + start, end) : min(begin + start + length, end)]
                shown = [place[part * length :][: piece.size] for place in places]
                if part not in outs:
                    shows.append((shown[self._rank], piece))
                else:
                    shown[self._rank] = piece
                    sums.append((outs[part][start : start + length], shown))
            yield _Turn(shows, sums)

    def _take(self, shown: np.ndarray, pulls: Sequence[Pull], longest: int) -> Iterator[_Turn]:
        for begin, length in self._pieces(longest, shown.itemsize):
            piece, places = shown[begin : begin + length], self._places(shown.dtype, length)
            shows = [(places[self._rank][: piece.size], piece)] if piece.size else []
            places[self._rank] = piece
            takes = []
            for peer, start, target in pulls:
                low, high = max(start, begin), min(start + target.size, begin + length)
                if low < high:
                    takes.append((target[low - start : high - start], places[peer][low - begin : high - begin]))
            yield _Turn(shows, takes=takes)

    def _pieces(self, length: int, itemsize: int) -> Iterator[tuple[int, int]]:
        """Starts and lengths of the pieces of `length` items of `itemsize` bytes. The first call is collective."""
        if length and not self._rings:
            self._make_rings()
        width = max(self._ring_bytes // _PIECES // itemsize, 1)
        for start in range(0, length, width):
            yield start, min(width, length - start)

    def _make_rings(self) -> None:
        """Make all ranks' rings. Collective."""
        mine = self._memory.empty(_PLACES * _step(ring_bytes(self._size)), or_anonymous=True)
        self._rings = rings = self._memory.peers(mine)
        self._step, self._ring_bytes = rings[0].nbytes // _PLACES, rings[0].nbytes

    def _places(self, dtype: np.dtype, length: int) -> list[np.ndarray]:
        """The place of each rank's next piece of `length` elements, which `_pieces` has given."""
        if dtype not in self._views:
            self._views[dtype] = [ring.view(dtype) for ring in self._rings]
        # The room is a power of two steps and begins at a multiple of itself, so consecutive pieces never overlap, also at the wrap.
        room = self._step << (-(-length * dtype.itemsize // self._step) - 1).bit_length()
        begin = -(-self._next // room) * room % self._ring_bytes
        self._next = begin + room
        begin //= dtype.itemsize
        return [ring[begin : begin + length] for ring in self._views[dtype]]


def _step(nbytes: int) -> int:
    """The bytes from place to place in a ring of about `nbytes`: whole cache lines."""
    return max(nbytes // _PLACES // _LINE, 1) * _LINE
