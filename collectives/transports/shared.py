"""Collectives of the ranks of one node, through memory that they share. Two ways to show the others an array:

- An `empty` array (memory.py) is read where it lies: every element moves once.
- Any other goes through windows, of which each rank has two in turn: all write a piece, meet, and take what they want from the
  others' windows. A window stays in the cores' caches, so the memory's own bandwidth goes to the callers' arrays alone, and one
  meeting a piece is enough: who meets for the next piece has taken everything of this one, and its window can be written again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from collectives.arrays import unowned
from collectives.dtypes import DType
from collectives.reduction import reduce_into
from collectives.transports.meeting import WORDS, Meeting
from collectives.transports.memory import NodeMemory
from collectives.transports.transport import even_parts, parts

_WINDOW_BYTES = 1 << 20  # of which two fit a core's share of the caches
# Bytes of all ranks' arrays up to which each rank adds them all: above, it pays to meet twice and add a slice each.
_ADD_ALL_BYTES = 1 << 16

Pull = tuple[int, int, np.ndarray]  # peer, first element of its array, where to copy from there on


class Shared:
    """The collectives of the ranks of `mpi`, all on one node. `memory`: the node's arrays that they know. Making it is collective.

    Arrays are flat, of the same length on all ranks unless said. OSError if the node's memory cannot be had.
    """

    def __init__(self, mpi: Any, memory: NodeMemory) -> None:
        self._rank, self._size = mpi.rank, mpi.size
        self._memory = memory
        self._own = NodeMemory(mpi)
        self._words = memoryview(self._own.shared(8 * WORDS * mpi.size)).cast("Q")  # type: ignore[arg-type]
        self._meet = Meeting(mpi, self._words).meet
        self._said = 1  # the word of a rank's in which it last said where its array lies
        self._turn = 0
        self._memories: list[list[np.ndarray]] = []  # each rank's windows of both turns, and as elements of a dtype:
        self._windows: dict[np.dtype, list[list[np.ndarray]]] = {}

    # The operations

    def all_reduce(self, flat: np.ndarray, op: str, dtype: DType) -> None:
        self._add(flat, op, dtype, takes=True)

    def reduce(self, flat: np.ndarray, op: str, root: int, dtype: DType) -> None:
        self._add(flat, op, dtype, takes=self._rank == root)

    def reduce_scatter(self, out: np.ndarray, flat: np.ndarray, op: str, counts: Sequence[int], dtype: DType) -> None:
        """Each rank adds its part of all arrays. `out` may be its own place in `flat`."""
        self.reduce_parts(flat, counts, {self._rank: out}, op, dtype)

    def reduce_parts(
        self, flat: np.ndarray, counts: Sequence[int], outs: Mapping[int, np.ndarray], op: str, dtype: DType
    ) -> None:
        """`flat` is parts of `counts` elements: `outs` are those that this rank is to have the reduction of, by number."""
        bounds, divisor = parts(counts), self._size if op == "avg" else 1
        shown = self._show(flat)
        if shown is not None:
            for part, out in outs.items():
                begin, end = bounds[part]
                reduce_into(out, [array[begin:end] for array in shown], op, dtype, divisor=divisor)
            self._meet()  # everyone has read: the caller may write again
            return
        # A window holds as much of every part, so that all ranks have something to add.
        width = _WINDOW_BYTES // (flat.itemsize * len(counts))
        for start in range(0, max(counts), width):
            windows = self._next_windows(flat.dtype)
            mine = windows[self._rank]
            for part, (begin, end) in enumerate(bounds):
                if part not in outs and begin + start < end:
                    piece = flat[begin + start : min(begin + start + width, end)]
                    mine[part * width :][: piece.size] = piece
            self._meet()
            for part, out in outs.items():
                piece, begin = out[start : start + width], bounds[part][0] + start
                addends = [window[part * width :][: piece.size] for window in windows]
                addends[self._rank] = flat[begin : begin + piece.size]
                reduce_into(piece, addends, op, dtype, divisor=divisor)

    def all_gather(self, out: np.ndarray, flat: np.ndarray, counts: Sequence[int]) -> None:
        """Where `out` is one array for the node, each rank writes its part, unless it stands there already."""
        pulls = [(peer, 0, out[slice(*part)]) for peer, part in enumerate(parts(counts))]
        self.collect(out, flat, pulls, longest=max(counts))

    def collect(self, out: np.ndarray, flat: np.ndarray, pulls: Sequence[Pull], longest: int) -> None:
        """`pull` from all ranks, this one included, into parts of `out`. Into one array for the node each rank writes its own."""
        of_node = self._memory.is_one_array(self._memory.find(out)[0])
        if of_node:
            # Both meetings always: whether a part already stands in its place may differ from rank to rank.
            self._meet()  # nobody still reads what stood here
        for peer, start, target in pulls:
            if peer == self._rank and target.size:
                own = flat[start : start + target.size]
                if not np.may_share_memory(own, target):
                    target[...] = own
        if of_node:
            self._meet()
        else:
            self._pull(flat, [pull for pull in pulls if pull[0] != self._rank], longest)

    def broadcast(self, flat: np.ndarray, root: int) -> None:
        at_root = self._rank == root
        self._pull(flat if at_root else flat[:0], [] if at_root else [(root, 0, flat)], flat.size)

    def gather(self, out: np.ndarray | None, flat: np.ndarray, root: int) -> None:
        """`out`: on the root alone, whose part stands in its place there already."""
        self._pull(flat, [] if out is None else self._others(out), flat.size)

    def scatter(self, out: np.ndarray, flat: np.ndarray | None, root: int) -> None:
        """`flat`: on the root alone, which has taken its part itself."""
        pulls = [] if self._rank == root else [(root, self._rank * out.size, out)]
        self._pull(out[:0] if flat is None else flat, pulls, out.size * self._size)

    def all_to_all(self, out: np.ndarray, flat: np.ndarray) -> None:
        """The two must not overlap."""
        count = flat.size // self._size
        begin = self._rank * count
        out[begin : begin + count] = flat[begin : begin + count]
        self._pull(flat, [(peer, begin, part) for peer, _, part in self._others(out)], flat.size)

    def plan(self, operation: str, *arguments: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """An operation with these arguments as one call, which keeps none of their arrays alive."""
        return getattr(self, operation), tuple(unowned(x) if isinstance(x, np.ndarray) else x for x in arguments)

    # How they come about

    def _add(self, flat: np.ndarray, op: str, dtype: DType, *, takes: bool) -> None:
        """The reduction, of the same bits on all ranks, into `flat` of the ranks that take it."""
        rank, divisor = self._rank, self._size if op == "avg" else 1
        adds_all = self._size <= 2 or flat.nbytes * self._size <= _ADD_ALL_BYTES
        for piece in _pieces(flat, _WINDOW_BYTES // flat.itemsize):
            shown = [window[: piece.size] for window in self._next_windows(flat.dtype)]
            shown[rank][...] = piece
            self._meet()
            if adds_all:
                if takes:
                    reduce_into(piece, shown, op, dtype, divisor=divisor)
                continue
            bounds = even_parts(piece.size, self._size)
            sums = self._next_windows(flat.dtype)
            begin, end = bounds[rank]
            reduce_into(sums[rank][begin:end], [window[begin:end] for window in shown], op, dtype, divisor=divisor)
            self._meet()
            if takes:
                for peer, (begin, end) in enumerate(bounds):
                    piece[begin:end] = sums[peer][begin:end]

    def _pull(self, flat: np.ndarray, pulls: Sequence[Pull], longest: int) -> None:
        """Show `flat` to the others, and copy what `pulls` says from theirs. `longest`: the elements of the longest rank's."""
        shown = self._show(flat)
        if shown is not None:
            for peer, start, target in pulls:
                target[...] = shown[peer][start : start + target.size]
            self._meet()
            return
        width = _WINDOW_BYTES // flat.itemsize
        for begin in range(0, longest, width):
            windows = self._next_windows(flat.dtype)
            piece = flat[begin : begin + width]
            windows[self._rank][: piece.size] = piece
            self._meet()
            for peer, start, target in pulls:
                low, high = max(start, begin), min(start + target.size, begin + width)
                if low < high:
                    target[low - start : high - start] = windows[peer][low - begin : high - begin]

    def _show(self, flat: np.ndarray) -> list[np.ndarray] | None:
        """Meet, and all ranks' arrays where they lie: in one allocation of the node's memory. None where one of them does not."""
        if self._memory.holds_none:
            return None
        words = self._words
        self._said = 5 - self._said  # there are two places to say it, in turn, as there are two windows
        slots = range(self._said, WORDS * self._size, WORDS)
        mine = slots[self._rank]
        words[mine], words[mine + 1] = self._memory.find(flat)
        words[mine + 2] = flat.nbytes
        self._meet()
        number = words[slots[0]]
        # Who passes an array of an allocation has not let go of it: all can read all.
        if number == 0 or any(words[slot] != number for slot in slots):
            return None
        views = [self._memory.view(number, words[slot + 1], words[slot + 2]) for slot in slots]
        return [view.view(flat.dtype) for view in views if view is not None]

    def _next_windows(self, dtype: np.dtype) -> list[np.ndarray]:
        """Each rank's window of the next turn, as elements of `dtype`."""
        views = self._windows.get(dtype)
        if views is None:
            if not self._memories:
                self._memories = [self._own.peers(self._own.empty(_WINDOW_BYTES)) for _ in range(2)]
            views = self._windows[dtype] = [[memory.view(dtype) for memory in turn] for turn in self._memories]
        self._turn ^= 1
        return views[self._turn]

    def _others(self, whole: np.ndarray) -> list[Pull]:
        """What the other ranks' arrays are to fill in `whole`."""
        count = whole.size // self._size
        return [(peer, 0, whole[peer * count :][:count]) for peer in range(self._size) if peer != self._rank]


def _pieces(flat: np.ndarray, width: int) -> Iterator[np.ndarray]:
    for start in range(0, flat.size, width):
        yield flat[start : start + width]
