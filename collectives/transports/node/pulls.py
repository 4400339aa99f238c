"""Operations that only move elements, between ranks that can read each other's shown arrays: the copies that each rank makes."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from collectives.transports.transport import parts


class Pull(NamedTuple):
    """A copy: from the array that `peer` shows, from element `start` on, to all of `target`."""

    peer: int
    start: int
    target: np.ndarray


class Exchange(NamedTuple):
    """The array that a rank shows, and the copies that it makes. `longest`: elements of the longest array, the same on all ranks."""

    shown: np.ndarray
    pulls: Sequence[Pull]
    longest: int


def all_gather(rank: int, out: np.ndarray, flat: np.ndarray, counts: Sequence[int]) -> Exchange:
    """A rank's own part is left out where `flat` is its place in `out`."""
    pulls = _whole(out, counts)
    if np.may_share_memory(pulls[rank].target, flat):
        del pulls[rank]
    return Exchange(flat, pulls, max(counts))


def broadcast(rank: int, flat: np.ndarray, root: int) -> Exchange:
    if rank == root:
        return Exchange(flat, [], flat.size)
    return Exchange(flat[:0], [Pull(root, 0, flat)], flat.size)


class ByPulling:
    """These operations of a Transport that shows arrays: by its `pull`."""

    _rank: int
    _size: int

    def pull(self, shown: np.ndarray, pulls: Sequence[Pull], longest: int) -> None:
        """Show an array to the others, and copy from theirs and this (see `Exchange`). All ranks together."""
        raise NotImplementedError

    def all_gather(self, out: np.ndarray, flat: np.ndarray, counts: Sequence[int]) -> None:
        self.pull(*all_gather(self._rank, out, flat, counts))

    def broadcast(self, flat: np.ndarray, root: int) -> None:
        self.pull(*broadcast(self._rank, flat, root))

    def gather(self, out: np.ndarray | None, flat: np.ndarray, root: int) -> None:
        """`out`: on the root alone, whose part stands in its place there already."""
        pulls = [] if out is None else _whole(out, [flat.size] * self._size)
        self.pull(flat, [pull for pull in pulls if pull.peer != root], flat.size)

    def scatter(self, out: np.ndarray, flat: np.ndarray | None, root: int) -> None:
        """`flat`: on the root alone, which has taken its part itself."""
        length = out.size * self._size
        if flat is None:
            self.pull(out[:0], [Pull(root, self._rank * out.size, out)], length)
        else:
            self.pull(flat, [], length)

    def all_to_all(self, out: np.ndarray, flat: np.ndarray) -> None:
        """The two must not overlap."""
        count = flat.size // self._size
        pulls = [pull._replace(start=self._rank * count) for pull in _whole(out, [count] * self._size)]
        self.pull(flat, pulls, flat.size)


def _whole(out: np.ndarray, counts: Sequence[int]) -> list[Pull]:
    """Each rank's whole array, to its part of `out`."""
    return [Pull(peer, 0, out[slice(*part)]) for peer, part in enumerate(parts(counts))]
