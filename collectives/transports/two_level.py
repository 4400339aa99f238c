"""Collectives of several nodes with equally many ranks: within each node through node memory; across nodes each rank sends its slice.

A link between two nodes carries the bytes of one array, whatever the number of ranks on a node, and all ranks of a node share the work
of sending them. The schedules of the same name (collectives/schedules) prove the pattern and give its cost. Long arrays are cut into
chunks: while the messages of one chunk travel, the ranks of a node work on the next and the previous chunk.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from collectives.arrays.dtypes import DType, dtype_of
from collectives.arrays.reduction import divide
from collectives.transports.node.pulls import Pull
from collectives.transports.node.shared import Shared
from collectives.transports.overlap import LANES, Bounds, Chunk, longest, overlap
from collectives.transports.transport import even_parts, parts


class TwoLevel:
    """`grid[k][i]`: the rank with local number i on node k.

    `across(operation, dtype, nbytes)`: the Transport for arrays of `nbytes` between the ranks of this rank's local number, by node.
    `divides_twice`: whether an average is divided on the node and again across nodes, so that `across` gets averages, not sums.
    """

    def __init__(
        self,
        grid: Sequence[Sequence[int]],
        rank: int,
        shared: Shared,
        across: Callable[[str, DType, int], Any],
        *,
        divides_twice: bool = False,
    ) -> None:
        self._grid, self._shared, self._across = grid, shared, across
        self._divides_twice = divides_twice
        self._size = len(grid) * len(grid[0])
        ((self._node, self._local),) = ((k, node.index(rank)) for k, node in enumerate(grid) if rank in node)

    def all_reduce(self, flat: np.ndarray, op: str, dtype: DType) -> None:
        """Each rank adds a slice of its node's arrays, then of all nodes' sums, and copies the other slices from its node's ranks."""
        total, divisor = self._levels(op)
        slices = even_parts(flat.size, len(self._grid[0]))
        inter_node, *cut = self._inter_node("all_reduce", dtype, longest(slices))

        def chunk(bounds: Bounds, lane: int) -> Chunk:
            mine = flat[slice(*bounds[self._local])]
            self._shared.reduce_parts(flat, bounds, {self._local: mine}, total, dtype)

            def finish() -> None:
                divide(mine, divisor, dtype)
                pulls = [Pull(peer, 0, flat[slice(*part)]) for peer, part in enumerate(bounds) if peer != self._local]
                self._shared.collect(flat, mine, pulls, longest(bounds))

            return inter_node(mine, total, dtype, lane=lane), finish

        overlap(chunk, slices, *cut)

    def reduce_scatter(self, out: np.ndarray, flat: np.ndarray, op: str, counts: Sequence[int], dtype: DType) -> None:
        """Each rank adds its node's arrays in the parts of its counterparts on all nodes; then the counterparts exchange these sums."""
        total, divisor = self._levels(op)
        ours = self._counterparts(self._local)
        inter_node, *cut = self._inter_node("reduce_scatter", dtype, max(counts), len(ours))

        def chunk(bounds: Bounds, lane: int) -> Chunk:
            lengths = [bounds[rank][1] - bounds[rank][0] for rank in ours]
            sums = np.empty(sum(lengths), flat.dtype)
            pieces = [sums[slice(*part)] for part in parts(lengths)]
            self._shared.reduce_parts(flat, bounds, dict(zip(ours, pieces, strict=True)), total, dtype)
            start = bounds[ours[self._node]][0] - first
            mine = out[start : start + lengths[self._node]]
            return inter_node(mine, sums, total, lengths, dtype, lane=lane), lambda: None

        first = sum(counts[: ours[self._node]])
        overlap(chunk, parts(counts), *cut)
        divide(out, divisor, dtype)

    def all_gather(self, out: np.ndarray, flat: np.ndarray, counts: Sequence[int]) -> None:
        """Each rank gathers the parts of its counterparts on all nodes; then the ranks of a node copy them from each other."""
        ours = self._counterparts(self._local)
        inter_node, *cut = self._inter_node("all_gather", dtype_of(flat.dtype), max(counts), len(ours))
        first = sum(counts[: ours[self._node]])

        def chunk(bounds: Bounds, lane: int) -> Chunk:
            lengths = [end - begin for begin, end in bounds]
            gathered = np.empty(sum(lengths[rank] for rank in ours), flat.dtype)
            start = bounds[ours[self._node]][0] - first
            mine = flat[start : start + lengths[ours[self._node]]]

            def finish() -> None:
                pulls: list[Pull] = []
                most = 0
                for peer in range(len(self._grid[0])):
                    theirs = self._counterparts(peer)
                    places = parts([lengths[rank] for rank in theirs])
                    most = max(most, places[-1][1])
                    pulls += [
                        Pull(peer, at, out[slice(*bounds[rank])]) for rank, (at, _) in zip(theirs, places, strict=True)
                    ]
                self._shared.collect(out, gathered, pulls, most)

            return inter_node(gathered, mine, [lengths[rank] for rank in ours], lane=lane), finish

        overlap(chunk, parts(counts), *cut)

    def broadcast(self, flat: np.ndarray, root: int) -> None:
        node, local = self._place(root)
        if self._local == local:
            self._across("broadcast", dtype_of(flat.dtype), flat.nbytes).broadcast(flat, node)
        self._shared.broadcast(flat, local)

    def reduce(self, flat: np.ndarray, op: str, root: int, dtype: DType) -> None:
        total, divisor = self._levels(op)
        node, local = self._place(root)
        at_root = (self._node, self._local) == (node, local)
        sums = flat.copy() if self._local == local and not at_root else flat
        self._shared.reduce(sums, total, local, dtype)
        if self._local == local:
            self._across("reduce", dtype, flat.nbytes).reduce(sums, total, node, dtype)
        if at_root:
            divide(flat, divisor, dtype)

    def _levels(self, op: str) -> tuple[str, int]:
        """The op on each of the two levels, and the divisor of the result."""
        return ("sum", self._size) if op == "avg" and not self._divides_twice else (op, 1)

    def _inter_node(
        self, operation: str, dtype: DType, length: int, num_parts: int = 1
    ) -> tuple[Callable[..., Iterator[None]], int, int]:
        """The function for `operation` across nodes on `num_parts` times `length` elements, and how `overlap` cuts them: the elements
        of `length` in a chunk, and the lanes."""
        transport = self._across(operation, dtype, num_parts * length * dtype.itemsize)
        if getattr(transport, "goes_in_rounds", False):  # one of our own algorithms (scheduled.py, encoded.py)
            return getattr(transport, f"{operation}_steps"), transport.width(num_parts, dtype), transport.num_lanes
        return partial(_at_once, getattr(transport, operation)), length, LANES

    def _counterparts(self, local: int) -> list[int]:
        """The ranks with this local number, by node."""
        return [node[local] for node in self._grid]

    def _place(self, rank: int) -> tuple[int, int]:
        return next((k, node.index(rank)) for k, node in enumerate(self._grid) if rank in node)


def _at_once(operation: Callable[..., None], *arguments: Any, lane: int) -> Iterator[None]:
    """An operation without steps, as one step."""
    operation(*arguments)
    yield
