"""`reduce_by` on several nodes: the ranks of a node combine their parts before they send them.

Each part has an owner, which reduces it. On every node one rank reads the owner's part in the arrays of all ranks of the node, combines
it within each run of ranks, and sends the results to the owner. The ranks of a node take turns at the owners. So a link carries one
array for each run, not one for each rank. The owner gets what it would have made of the ranks' parts itself.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from collectives.transports.node.shared import Shared
from collectives.transports.transport import Counts, Transport, parts

_ALIGN = 16  # bytes: the parts in a message begin at whole elements of any dtype


class Runs(NamedTuple):
    """Runs of neighbouring ranks whose parts `Communicator.reduce_by` combines before it sends them. The same on all ranks."""

    bounds: Sequence[tuple[int, int]]
    """Of each run the first rank and the one after the last, in order. All ranks of a run are on one node. The parts of a rank that
    is in no run are left out."""
    combine: Callable[[Any, list[Any]], object]
    """`combine(out, parts)` fills `out`, as long as each part, with what `reduce` gets for a run of several ranks. Any rank of the
    run's node may call it, or the owner of the part. It only reads the parts, and calls no collective."""
    dtype: Any
    """The dtype of `out`, of the library of the arrays. A run of one rank is not combined: `reduce` gets its part as it is."""

    @classmethod
    def alone(cls, num_ranks: int, dtype: Any) -> "Runs":
        """A run for each rank."""
        return cls([(rank, rank + 1) for rank in range(num_ranks)], _never, dtype)


def _never(out: Any, parts: list[Any]) -> None:
    raise AssertionError("a run of one rank is not combined")


class NodeExchange:
    """The messages of one call. `grid[k]`: the ranks on node k, in order. `bounds`: of the owners' parts. `runs`: their bounds.

    `dtype`: of the arrays; `combined`: of what `combine` fills. All are the same on all ranks, except `rank`, the number of this one.
    """

    def __init__(
        self,
        rank: int,
        grid: Sequence[Sequence[int]],
        bounds: Sequence[tuple[int, int]],
        runs: Sequence[tuple[int, int]],
        dtype: np.dtype,
        combined: np.dtype,
    ) -> None:
        self._rank, self._grid, self._bounds, self._dtypes = rank, grid, bounds, (dtype, combined)
        self._place = {rank: (k, local) for k, ranks in enumerate(grid) for local, rank in enumerate(ranks)}
        self._runs = [[run for run in runs if self._place[run[0]][0] == k] for k in range(len(grid))]  # by node

    def carry_out(
        self,
        flat: np.ndarray,
        combine: Callable[[np.ndarray, Sequence[np.ndarray]], object],
        shared: Shared,
        across: Transport,
    ) -> list[np.ndarray]:
        """This rank's part of each run, in order. Collective. `shared`: of this rank's node; `across`: of all ranks."""
        node, num_ranks = self._place[self._rank][0], len(self._bounds)
        owners = [owner for owner in range(num_ranks) if self._sender(node, owner) == self._rank]
        senders = [self._sender(k, self._rank) for k in range(len(self._grid))]
        send, recv = [0] * num_ranks, [0] * num_ranks
        for owner in owners:
            send[owner] = sum(self._rooms(node, owner))
        for k, sender in enumerate(senders):
            recv[sender] = sum(self._rooms(k, self._rank))
        sent, received = (np.empty(sum(counts), np.uint8) for counts in (send, recv))
        messages = [sent[slice(*part)] for part in parts(send)]

        def pack(of_owners: Sequence[Sequence[np.ndarray]]) -> None:
            for owner, of_ranks in zip(owners, of_owners, strict=True):
                for (begin, end), out in zip(self._runs[node], self._split(messages[owner], node, owner), strict=True):
                    first = self._place[begin][1]
                    of_run = of_ranks[first : first + end - begin]
                    if len(of_run) == 1:
                        out[...] = of_run[0]
                    else:
                        combine(out, of_run)

        shared.use_parts(flat, [self._bounds[owner] for owner in owners], pack)
        across.all_to_all(received, sent, Counts(send, recv))
        arrived: dict[tuple[int, int], np.ndarray] = {}
        places = parts(recv)
        for k, sender in enumerate(senders):
            message = received[slice(*places[sender])]
            arrived |= zip(self._runs[k], self._split(message, k, self._rank), strict=True)
        return [arrived[run] for run in sorted(arrived)]

    def _sender(self, node: int, owner: int) -> int:
        """The rank that sends the parts of a node to an owner: on the owner's node itself, else the ranks take turns."""
        ranks = self._grid[node]
        if self._place[owner][0] == node:
            return owner
        number = owner - bisect_left(ranks, owner)  # of the owner among the ranks of other nodes
        return ranks[number % len(ranks)]

    def _rooms(self, node: int, owner: int) -> list[int]:
        """The bytes of each run's part in the message of a node to an owner."""
        begin, end = self._bounds[owner]
        return [-(-(end - begin) * self._dtype(run).itemsize // _ALIGN) * _ALIGN for run in self._runs[node]]

    def _split(self, message: np.ndarray, node: int, owner: int) -> list[np.ndarray]:
        """The places of the runs' parts in a message."""
        begin, end = self._bounds[owner]
        return [
            message[at : at + (end - begin) * self._dtype(run).itemsize].view(self._dtype(run))
            for run, (at, _) in zip(self._runs[node], parts(self._rooms(node, owner)), strict=True)
        ]

    def _dtype(self, run: tuple[int, int]) -> np.dtype:
        return self._dtypes[run[1] - run[0] > 1]
