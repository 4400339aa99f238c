"""Collectives of several nodes of equally many ranks: within each node through its memory, across nodes by each rank for its slice.

Every link between two nodes then carries the bytes of one rank, whatever the number of ranks on a node, and all of a node's ranks
share the work of sending them. The schedules of the same name (collectives/schedules) prove and price the pattern.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.dtypes import DType
from collectives.reduction import divide
from collectives.transports.shared import Pull, Shared
from collectives.transports.transport import even_parts, parts


class TwoLevel:
    """`grid[k][i]`: the rank that is number i on node k. `across`: the Communicator of the ranks of this one's number, by node."""

    def __init__(self, grid: Sequence[Sequence[int]], rank: int, shared: Shared, across: Any) -> None:
        self._grid, self._shared, self._across = grid, shared, across
        self._size = len(grid) * len(grid[0])
        ((self._node, self._local),) = ((k, node.index(rank)) for k, node in enumerate(grid) if rank in node)

    def all_reduce(self, flat: np.ndarray, op: str, dtype: DType) -> None:
        total = "sum" if op == "avg" else op
        bounds = even_parts(flat.size, len(self._grid[0]))
        counts = [end - begin for begin, end in bounds]
        mine = flat[slice(*bounds[self._local])]
        self._shared.reduce_scatter(mine, flat, total, counts, dtype)
        self._across.all_reduce(mine, total)
        if op == "avg":
            divide(mine, self._size, dtype)
        self._shared.all_gather(flat, mine, counts)

    def reduce_scatter(self, out: np.ndarray, flat: np.ndarray, op: str, counts: Sequence[int], dtype: DType) -> None:
        total = "sum" if op == "avg" else op
        ours = self._counterparts(self._local)
        sums = np.empty(sum(counts[rank] for rank in ours), flat.dtype)
        pieces = [sums[slice(*part)] for part in parts([counts[rank] for rank in ours])]
        self._shared.reduce_parts(flat, counts, dict(zip(ours, pieces, strict=True)), total, dtype)
        self._across.reduce_scatter(out, sums, total, counts=[counts[rank] for rank in ours])
        if op == "avg":
            divide(out, self._size, dtype)

    def all_gather(self, out: np.ndarray, flat: np.ndarray, counts: Sequence[int]) -> None:
        places = parts(counts)
        ours = self._counterparts(self._local)
        gathered = np.empty(sum(counts[rank] for rank in ours), flat.dtype)
        self._across.all_gather(gathered, flat, counts=[counts[rank] for rank in ours])
        pulls: list[Pull] = []
        for peer in range(len(self._grid[0])):
            theirs = self._counterparts(peer)
            for rank, (begin, _) in zip(theirs, parts([counts[rank] for rank in theirs]), strict=True):
                pulls.append((peer, begin, out[slice(*places[rank])]))
        longest = max(sum(counts[rank] for rank in self._counterparts(peer)) for peer in range(len(self._grid[0])))
        self._shared.collect(out, gathered, pulls, longest)

    def broadcast(self, flat: np.ndarray, root: int) -> None:
        node, local = self._place(root)
        if self._local == local:
            self._across.broadcast(flat, node)
        self._shared.broadcast(flat, local)

    def reduce(self, flat: np.ndarray, op: str, root: int, dtype: DType) -> None:
        total = "sum" if op == "avg" else op
        node, local = self._place(root)
        at_root = (self._node, self._local) == (node, local)
        sums = flat.copy() if self._local == local and not at_root else flat
        self._shared.reduce(sums, total, local, dtype)
        if self._local == local:
            self._across.reduce(sums, node, total)
        if at_root and op == "avg":
            divide(flat, self._size, dtype)

    def _counterparts(self, local: int) -> list[int]:
        """The ranks of this number on their nodes, by node."""
        return [node[local] for node in self._grid]

    def _place(self, rank: int) -> tuple[int, int]:
        return next((k, node.index(rank)) for k, node in enumerate(self._grid) if rank in node)
