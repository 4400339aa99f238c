"""Operations that only move elements, as copies: each rank shows one array, and copies from the arrays that its peers show."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from collectives.transports.transport import Counts, parts


class Pull(NamedTuple):
    """A copy to all of `target` from the array that `peer` shows, from element `start` on."""

    peer: int
    start: int
    target: np.ndarray


class PullExchange(NamedTuple):
    """The array that a rank shows, and the copies that it makes. `longest`: elements of the longest array, the same on all ranks."""

    shown: np.ndarray
    pulls: Sequence[Pull]
    longest: int


def all_gather(rank: int, out: np.ndarray, flat: np.ndarray, counts: Sequence[int]) -> PullExchange:
    """This rank's own part is not copied if `flat` lies in its place in `out`."""
    pulls = _whole(out, counts)
    if np.may_share_memory(pulls[rank].target, flat):
        del pulls[rank]
    return PullExchange(flat, pulls, max(counts))


def broadcast(rank: int, flat: np.ndarray, root: int) -> PullExchange:
    if rank == root:
        return PullExchange(flat, [], flat.size)
    return PullExchange(flat[:0], [Pull(root, 0, flat)], flat.size)


class ByPulling:
    """The operations of a Transport that only move elements, by its method `pull`."""

    _rank: int
    _size: int

    def pull(self, shown: np.ndarray, pulls: Sequence[Pull], longest: int) -> None:
        """Show an array to all ranks and copy from the shown arrays (see `PullExchange`). Collective."""
        raise NotImplementedError

    def all_gather(self, out: np.ndarray, flat: np.ndarray, counts: Sequence[int]) -> None:
        self.pull(*all_gather(self._rank, out, flat, counts))

    def broadcast(self, flat: np.ndarray, root: int) -> None:
        self.pull(*broadcast(self._rank, flat, root))

    def gather(self, out: np.ndarray | None, flat: np.ndarray, root: int) -> None:
        """`out`: None except on the root, where it already holds the root's own part."""
        pulls = [] if out is None else _whole(out, [flat.size] * self._size)
        self.pull(flat, [pull for pull in pulls if pull.peer != root], flat.size)

    def scatter(self, out: np.ndarray, flat: np.ndarray | None, root: int) -> None:
        """`flat`: None except on the root, which has already copied its own part."""
        length = out.size * self._size
        if flat is None:
            self.pull(out[:0], [Pull(root, self._rank * out.size, out)], length)
        else:
            self.pull(flat, [], length)

    def all_to_all(self, out: np.ndarray, flat: np.ndarray, counts: Counts | None = None) -> None:
        """`out` and `flat` must not overlap. ValueError on all ranks if a rank's counts do not fit those of the others."""
        if counts is None:
            sent = np.full((self._size, self._size), flat.size // self._size)
        else:  # a part's place in its sender's array follows from the counts of the sender, which no other rank knows
            sent = self._sent(counts)
        begins = np.cumsum(sent, axis=1) - sent
        pulls = [
            pull._replace(start=int(begins[pull.peer, self._rank]))
            for pull in _whole(out, sent[:, self._rank].tolist())
        ]
        self.pull(flat, pulls, int(sent.sum(axis=1).max()))

    def _sent(self, counts: Counts) -> np.ndarray:
        """The counts of all ranks, (sender, receiver)."""
        all_counts = np.empty((self._size, 2, self._size), np.int64)
        mine = np.array(counts, np.int64).reshape(-1)
        self.all_gather(all_counts.reshape(-1), mine, [mine.size] * self._size)
        sent, received = all_counts[:, 0], all_counts[:, 1].T
        for sender, receiver in np.argwhere(sent != received)[:1].tolist():
            raise ValueError(
                f"all_to_all: rank {sender} sends {sent[sender, receiver]} elements to rank {receiver}, which expects "
                f"{received[sender, receiver]}; expected the same number in send_counts and recv_counts"
            )
        return sent


def _whole(out: np.ndarray, counts: Sequence[int]) -> list[Pull]:
    """Copies of each rank's whole array to its part of `out`."""
    return [Pull(peer, 0, out[slice(*part)]) for peer, part in enumerate(parts(counts))]
