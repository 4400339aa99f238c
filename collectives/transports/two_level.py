"""Collectives of several nodes with equally many ranks: within each node through node memory; across nodes each rank sends its slice.

A link between two nodes carries the bytes of one array, whatever the number of ranks on a node, and all ranks of a node share the work
of sending them. The schedules of the same name (collectives/schedules) prove the pattern and give its cost. Long arrays are cut into
chunks: while the messages of one chunk travel, the ranks of a node work on the next and the previous chunk.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from collectives.arrays.dtypes import DType, dtype_of
from collectives.arrays.reduction import divide
from collectives.transports.node.pulls import Pull
from collectives.transports.node.shared import Shared
from collectives.transports.transport import even_parts, parts

_CHUNK_BYTES = 1 << 19  # of a chunk's data that a rank exchanges with other nodes: one segment of the executor
_LANES = 8  # the most unfinished chunks
_DONE = object()

Bounds = list[tuple[int, int]]  # begin and end of ranges of an array
# A started chunk: its messages between nodes (see `Scheduled.all_reduce_steps`), and the work to do after them.
Chunk = tuple[Iterator[None], Callable[[], None]]


class TwoLevel:
    """`grid[k][i]`: the rank with local number i on node k.

    `across(operation, dtype, nbytes)`: the Transport for arrays of `nbytes` between the ranks of this rank's local number, by node.
    """

    def __init__(
        self,
        grid: Sequence[Sequence[int]],
        rank: int,
        shared: Shared,
        across: Callable[[str, DType, int], Any],
    ) -> None:
        self._grid, self._shared, self._across = grid, shared, across
        self._size = len(grid) * len(grid[0])
        ((self._node, self._local),) = ((k, node.index(rank)) for k, node in enumerate(grid) if rank in node)

    def all_reduce(self, flat: np.ndarray, op: str, dtype: DType) -> None:
        """Each rank adds a slice of its node's arrays, then of all nodes' sums, and copies the other slices from its node's ranks."""
        total = "sum" if op == "avg" else op
        slices = even_parts(flat.size, len(self._grid[0]))
        across, width = self._way("all_reduce", dtype, _longest(slices))

        def chunk(bounds: Bounds, lane: int) -> Chunk:
            mine = flat[slice(*bounds[self._local])]
            self._shared.reduce_parts(flat, bounds, {self._local: mine}, total, dtype)

            def finish() -> None:
                if op == "avg":
                    divide(mine, self._size, dtype)
                pulls = [Pull(peer, 0, flat[slice(*part)]) for peer, part in enumerate(bounds) if peer != self._local]
                self._shared.collect(flat, mine, pulls, _longest(bounds))

            return across(mine, total, dtype, lane=lane), finish

        _overlap(chunk, slices, width)

    def reduce_scatter(self, out: np.ndarray, flat: np.ndarray, op: str, counts: Sequence[int], dtype: DType) -> None:
        """Each rank adds its node's arrays in the parts of its counterparts on all nodes; then the counterparts exchange these sums."""
        total = "sum" if op == "avg" else op
        ours = self._counterparts(self._local)
        across, width = self._way("reduce_scatter", dtype, max(counts), len(ours))

        def chunk(bounds: Bounds, lane: int) -> Chunk:
            lengths = [bounds[rank][1] - bounds[rank][0] for rank in ours]
            sums = np.empty(sum(lengths), flat.dtype)
            pieces = [sums[slice(*part)] for part in parts(lengths)]
            self._shared.reduce_parts(flat, bounds, dict(zip(ours, pieces, strict=True)), total, dtype)
            start = bounds[ours[self._node]][0] - first
            mine = out[start : start + lengths[self._node]]
            return across(mine, sums, total, lengths, dtype, lane=lane), lambda: None

        first = sum(counts[: ours[self._node]])
        _overlap(chunk, parts(counts), width)
        if op == "avg":
            divide(out, self._size, dtype)

    def all_gather(self, out: np.ndarray, flat: np.ndarray, counts: Sequence[int]) -> None:
        """Each rank gathers the parts of its counterparts on all nodes; then the ranks of a node copy them from each other."""
        ours = self._counterparts(self._local)
        across, width = self._way("all_gather", dtype_of(flat.dtype), max(counts), len(ours))
        first = sum(counts[: ours[self._node]])

        def chunk(bounds: Bounds, lane: int) -> Chunk:
            lengths = [end - begin for begin, end in bounds]
            gathered = np.empty(sum(lengths[rank] for rank in ours), flat.dtype)
            start = bounds[ours[self._node]][0] - first
            mine = flat[start : start + lengths[ours[self._node]]]

            def finish() -> None:
                pulls: list[Pull] = []
                longest = 0
                for peer in range(len(self._grid[0])):
                    theirs = self._counterparts(peer)
                    places = parts([lengths[rank] for rank in theirs])
                    longest = max(longest, places[-1][1])
                    pulls += [
                        Pull(peer, at, out[slice(*bounds[rank])]) for rank, (at, _) in zip(theirs, places, strict=True)
                    ]
                self._shared.collect(out, gathered, pulls, longest)

            return across(gathered, mine, [lengths[rank] for rank in ours], lane=lane), finish

        _overlap(chunk, parts(counts), width)

    def broadcast(self, flat: np.ndarray, root: int) -> None:
        node, local = self._place(root)
        if self._local == local:
            self._across("broadcast", dtype_of(flat.dtype), flat.nbytes).broadcast(flat, node)
        self._shared.broadcast(flat, local)

    def reduce(self, flat: np.ndarray, op: str, root: int, dtype: DType) -> None:
        total = "sum" if op == "avg" else op
        node, local = self._place(root)
        at_root = (self._node, self._local) == (node, local)
        sums = flat.copy() if self._local == local and not at_root else flat
        self._shared.reduce(sums, total, local, dtype)
        if self._local == local:
            self._across("reduce", dtype, flat.nbytes).reduce(sums, total, node, dtype)
        if at_root and op == "avg":
            divide(flat, self._size, dtype)

    def _way(
        self, operation: str, dtype: DType, length: int, num_parts: int = 1
    ) -> tuple[Callable[..., Iterator[None]], int]:
        """The function for `operation` across nodes on `num_parts` times `length` elements, and the elements of `length` in a chunk."""
        transport = self._across(operation, dtype, num_parts * length * dtype.itemsize)
        if getattr(transport, "goes_in_rounds", False):  # one of our own algorithms (scheduled.py)
            return getattr(transport, f"{operation}_steps"), max(_CHUNK_BYTES // (num_parts * dtype.itemsize), 1)
        return partial(_at_once, getattr(transport, operation)), length

    def _counterparts(self, local: int) -> list[int]:
        """The ranks with this local number, by node."""
        return [node[local] for node in self._grid]

    def _place(self, rank: int) -> tuple[int, int]:
        return next((k, node.index(rank)) for k, node in enumerate(self._grid) if rank in node)


def _overlap(chunk: Callable[[Bounds, int], Chunk], ranges: Bounds, width: int) -> None:
    """Carry out `chunk(bounds, lane)` for each `width` elements of all `ranges`; a chunk begins while earlier chunks are unfinished.

    All ranks begin and continue the chunks in the same order, and the chunks' schedules run in rounds. So no rank waits for a message
    that another rank sends only after it has waited for this rank.
    """
    under_way: deque[Chunk] = deque()
    longest, start, num_begun = _longest(ranges), 0, 0
    while start < longest or under_way:
        before = list(under_way)
        if start < longest and len(under_way) < _LANES:
            bounds = [(min(begin + start, end), min(begin + start + width, end)) for begin, end in ranges]
            under_way.append(chunk(bounds, num_begun % _LANES))
            next(under_way[-1][0], None)
            start, num_begun = start + width, num_begun + 1
        for messages, finish in before:
            if next(messages, _DONE) is _DONE:
                under_way.popleft()
                finish()


def _longest(ranges: Bounds) -> int:
    return max(end - begin for begin, end in ranges)


def _at_once(operation: Callable[..., None], *arguments: Any, lane: int) -> Iterator[None]:
    """An operation without steps, as one step."""
    operation(*arguments)
    yield
