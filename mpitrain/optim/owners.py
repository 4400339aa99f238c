"""Which rank computes with which whole matrix, and which boxes the ranks send each other for that.

This module is pure arithmetic, without torch and MPI.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from mpitrain.placement.parts import Box


@dataclass(frozen=True)
class Matrix:
    """A matrix of `shape`, of which rank r holds the boxes `held[r]`. Several ranks may hold the same box, and boxes do not overlap."""

    shape: tuple[int, ...]
    cost: float
    held: tuple[tuple[Box, ...], ...]

    @cached_property
    def holders(self) -> dict[Box, list[int]]:
        """The ranks that hold each box, in order of the boxes."""
        found: dict[Box, list[int]] = {}
        for rank, boxes in enumerate(self.held):
            for box in boxes:
                found.setdefault(box, []).append(rank)
        return dict(sorted(found.items()))

    @property
    def is_complete(self) -> bool:
        """Whether the boxes of all ranks make the whole matrix."""
        return sum(box.numel for box in self.holders) == prod(self.shape)

    @property
    def is_everywhere(self) -> bool:
        """Whether each rank holds the whole matrix."""
        return all(sum(box.numel for box in boxes) == prod(self.shape) for boxes in self.held)

    def sender(self, box: Box, owner: int) -> int:
        """The rank whose elements of `box` the owner uses: its own, or those of the nearest rank, which is likely on its node."""
        return min(self.holders[box], key=lambda rank: (abs(rank - owner), rank))


def assign(matrices: Sequence[Matrix], num_ranks: int) -> list[int]:
    """The owner of each matrix, so that the ranks have about the same cost. The same on all ranks.

    The most expensive matrix first, each to the rank with the least cost so far (LPT: Graham 1969); among such ranks to the one that
    holds most of the matrix, then to the first. The largest load is at most 4/3 of the smallest possible.
    """
    loads, owners = [0.0] * num_ranks, [0] * len(matrices)
    for index in sorted(range(len(matrices)), key=lambda i: -matrices[i].cost):
        matrix = matrices[index]
        owner = min(range(num_ranks), key=lambda r: (loads[r], -sum(box.numel for box in matrix.held[r]), r))
        owners[index] = owner
        loads[owner] += matrix.cost
    return owners


Boxes = list[tuple[int, Box]]
"""Boxes, each of the matrix with this index."""


@dataclass(frozen=True)
class Routes:
    """The boxes that a rank moves so that every matrix is whole on its owner, and so that the holders of a box get its results."""

    own: Boxes
    """Of the rank's matrices, what it holds itself."""
    sends: list[Boxes]
    """To the owner with this number."""
    receives: list[Boxes]
    """Of the rank's matrices, from the rank with this number."""
    returns: list[Boxes]
    """Results of the rank's matrices, to the rank with this number: more than it sent, if several ranks hold a box."""
    gets_back: list[Boxes]
    """Results, from the owner with this number."""


def routes(matrices: Sequence[Matrix], owners: Sequence[int], rank: int, num_ranks: int) -> Routes:
    """Those of `rank`. The two ends of a route list the same boxes in the same order."""
    own: Boxes = []
    sends, receives, returns, gets_back = ([list[tuple[int, Box]]() for _ in range(num_ranks)] for _ in range(4))
    for index, (matrix, owner) in enumerate(zip(matrices, owners, strict=True)):
        for box, holders in matrix.holders.items():
            sender = matrix.sender(box, owner)
            if rank == owner:
                (own if sender == rank else receives[sender]).append((index, box))
                for holder in holders:
                    if holder != rank:
                        returns[holder].append((index, box))
            elif rank in holders:
                gets_back[owner].append((index, box))
                if sender == rank:
                    sends[owner].append((index, box))
    return Routes(own, sends, receives, returns, gets_back)
