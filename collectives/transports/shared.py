"""Collectives of the ranks of one node, which read each other's arrays directly: every element moves once.

Arrays in the node's memory (memory.py) are read where they lie, private ones through the kernel (peer.py), and where it does not
allow that, through a staging area in the node's memory. Ranks may mix all kinds. Two ideas make all operations:

- `_reduce_parts`: each rank reads all ranks' arrays in the parts it owns, adds in order of rank and rounds once;
- `_pull`: each rank copies what it wants out of its peers' arrays.

Ranks meet at MPI barriers, which also order the memory. Before the first, each rank writes on the board where its array lies.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from collectives.arrays import address_of
from collectives.dtypes import DType
from collectives.reduction import reduce_blocks, reduce_into
from collectives.transports.memory import NodeMemory
from collectives.transports.peer import PeerReader, peer_readers
from collectives.transports.transport import even_parts, parts

_STAGE_BYTES = 1 << 20  # of a window of the staging area: it stays in the core's cache
_SLOT = 8  # words of a rank on the board: a cache line of its own

Pull = tuple[int, int, np.ndarray]  # peer, first element of its array, where to copy from there on


class _Source:
    """A rank's array, as the others see it."""

    __slots__ = ("_address", "_bytes", "_reader")

    def __init__(self, view: np.ndarray | None, reader: PeerReader | None = None, address: int = 0) -> None:
        self._bytes, self._reader, self._address = view, reader, address

    @property
    def is_readable(self) -> bool:
        return self._bytes is not None or self._reader is not None

    def elements(self, start: int, stop: int, scratch: np.ndarray) -> np.ndarray:
        """These elements of it: where they lie, or read into `scratch`. Of the dtype of `scratch`."""
        if self._bytes is not None:
            return self._bytes[start * scratch.itemsize : stop * scratch.itemsize].view(scratch.dtype)
        scratch = scratch[: stop - start]
        self.copy(start, scratch)
        return scratch

    def copy(self, start: int, target: np.ndarray) -> None:
        """Copy the elements from `start` on to `target`."""
        if self._reader is not None:
            if target.size:
                address = address_of(target)
                self._reader.read(address, self._address + start * target.itemsize, target.nbytes)
        else:
            assert self._bytes is not None
            begin = start * target.itemsize
            target.view(np.uint8)[...] = self._bytes[begin : begin + target.nbytes]


class Shared:
    """The collectives of the ranks of `mpi`, all on one node. `memory`: the node's arrays that they know. Making it is collective.

    Arrays are flat, of the same length on all ranks unless said. OSError if the node's memory cannot be had.
    """

    def __init__(self, mpi: Any, memory: NodeMemory) -> None:
        self._mpi = mpi
        self._rank, self._size = mpi.rank, mpi.size
        self._memory = memory
        self._own = NodeMemory(mpi)
        self._board = memoryview(self._own.shared(8 * _SLOT * mpi.size)).cast("Q")  # type: ignore[arg-type]
        self._readers = peer_readers(mpi)
        self._windows: list[list[np.ndarray]] = []  # two staging areas of each rank

    @property
    def reads_private(self) -> bool:
        """Whether the kernel lets these ranks read each other's private memory."""
        return self._readers is not None

    # The operations

    def all_reduce(self, flat: np.ndarray, op: str, dtype: DType) -> None:
        """Each rank adds its slice of all arrays into its own, then copies the other slices from their owners."""
        bounds = even_parts(flat.size, self._size)
        sources = self._meet(flat)
        # Nobody else reads this rank's array in its own slice, so the sum may be written there at once.
        self._reduce_parts(sources, flat, bounds, {self._rank: flat[slice(*bounds[self._rank])]}, op, dtype)
        pulls = [(peer, begin, flat[begin:end]) for peer, (begin, end) in enumerate(bounds) if peer != self._rank]
        self._pull(sources, flat, pulls, flat.nbytes)

    def reduce_scatter(self, out: np.ndarray, flat: np.ndarray, op: str, counts: Sequence[int], dtype: DType) -> None:
        """Each rank adds its part of all arrays. `out` may be its own place in `flat`."""
        self.reduce_parts(flat, counts, {self._rank: out}, op, dtype)

    def reduce_parts(
        self, flat: np.ndarray, counts: Sequence[int], outs: Mapping[int, np.ndarray], op: str, dtype: DType
    ) -> None:
        """`flat` is parts of `counts` elements: `outs` are those that this rank is to have the reduction of, by number."""
        bounds = parts(counts)
        self._reduce_parts(self._meet(flat), flat, bounds, outs, op, dtype)

    def all_gather(self, out: np.ndarray, flat: np.ndarray, counts: Sequence[int]) -> None:
        """Where `out` is one array for the node, each rank writes its part, unless it stands there already."""
        self.collect(out, flat, [(peer, 0, out[slice(*part)]) for peer, part in enumerate(parts(counts))])

    def collect(self, out: np.ndarray, flat: np.ndarray, pulls: Sequence[Pull]) -> None:
        """`pull` from all ranks, this one included, into parts of `out`. Into one array for the node each rank writes its own."""
        of_node = self._memory.is_one_array(self._memory.find(out)[0])
        if of_node:
            # Both barriers always: whether a part already stands in its place may differ from rank to rank.
            self._mpi.Barrier()  # nobody still reads what stood here
        for peer, start, target in pulls:
            if peer == self._rank and target.size:
                own = flat[start : start + target.size]
                if not np.may_share_memory(own, target):
                    target[...] = own
        if of_node:
            self._mpi.Barrier()
        else:
            self.pull(flat, [pull for pull in pulls if pull[0] != self._rank])

    def broadcast(self, flat: np.ndarray, root: int) -> None:
        self.pull(flat, [] if self._rank == root else [(root, 0, flat)])

    def reduce(self, flat: np.ndarray, op: str, root: int, dtype: DType) -> None:
        """Each rank reduces a slice, which the root then copies. The others' arrays stay as they are."""
        bounds = even_parts(flat.size, self._size)
        begin, end = bounds[self._rank]
        mine = flat[begin:end] if self._rank == root else np.empty(end - begin, flat.dtype)
        self._reduce_parts(self._meet(flat), flat, bounds, {self._rank: mine}, op, dtype)
        pulls = [(peer, 0, flat[slice(*part)]) for peer, part in enumerate(bounds) if peer != root]
        self.pull(mine, pulls if self._rank == root else [])

    def gather(self, out: np.ndarray | None, flat: np.ndarray, root: int) -> None:
        """`out`: on the root alone, whose part stands in its place there already."""
        pulls = [] if out is None else [(peer, 0, part) for peer, part in self._others(out)]
        self.pull(flat, pulls)

    def scatter(self, out: np.ndarray, flat: np.ndarray | None, root: int) -> None:
        """`flat`: on the root alone, which has taken its part itself."""
        pulls = [] if self._rank == root else [(root, self._rank * out.size, out)]
        self.pull(np.empty(0, out.dtype) if flat is None else flat, pulls)

    def all_to_all(self, out: np.ndarray, flat: np.ndarray) -> None:
        """The two must not overlap."""
        count = flat.size // self._size
        mine = slice(self._rank * count, (self._rank + 1) * count)
        out[mine] = flat[mine]
        self.pull(flat, [(peer, self._rank * count, part) for peer, part in self._others(out)])

    def pull(self, flat: np.ndarray, pulls: Sequence[Pull]) -> None:
        """Show `flat` to the others, and copy what `pulls` says from theirs, which may have other lengths."""
        self._pull(self._meet(flat), flat, pulls, max(self._board[_SLOT * rank + 2] for rank in range(self._size)))

    # The two ideas

    def _meet(self, flat: np.ndarray) -> list[_Source] | None:
        """Wait for all ranks; every rank's array in order of rank, or None where they must go through the staging area."""
        board, slots = self._board, range(0, _SLOT * self._size, _SLOT)
        slot = _SLOT * self._rank
        board[slot], board[slot + 1] = self._memory.find(flat)
        board[slot + 2], board[slot + 3] = flat.nbytes, address_of(flat)
        self._mpi.Barrier()
        sources = []
        for rank, at in enumerate(slots):
            number, place, nbytes, address = board[at : at + 4]
            if rank == self._rank:
                sources.append(_Source(flat.view(np.uint8)))
            elif number and (view := self._memory.view(number, place, nbytes)) is not None:
                sources.append(_Source(view))
            else:
                sources.append(_Source(None, self._readers[rank] if self._readers else None, address))
        if self._readers is None:
            board[slot + 4] = any(not source.is_readable for source in sources)
            self._mpi.Barrier()
            if any(board[at + 4] for at in slots):
                return None
        return sources

    def _reduce_parts(
        self,
        sources: list[_Source] | None,
        flat: np.ndarray,
        bounds: Sequence[tuple[int, int]],
        outs: Mapping[int, np.ndarray],
        op: str,
        dtype: DType,
    ) -> None:
        divisor = self._size if op == "avg" else 1
        if sources is not None:
            for part, out in outs.items():
                begin = bounds[part][0]

                def elements(rank: int, start: int, stop: int, scratch: np.ndarray, begin: int = begin) -> np.ndarray:
                    return sources[rank].elements(begin + start, begin + stop, scratch)

                reduce_blocks(out, self._size, elements, op, dtype, divisor=divisor)
        else:
            # A window holds as much of every part, so that all ranks have something to add.
            width = max(_STAGE_BYTES // (flat.itemsize * len(bounds)), 1)
            longest = max(end - begin for begin, end in bounds)
            for turn, start in enumerate(range(0, longest, width)):
                windows = [
                    window.view(flat.dtype) for window in self._staging(turn, width * len(bounds) * flat.itemsize)
                ]
                mine = windows[self._rank]
                for part, (begin, end) in enumerate(bounds):
                    piece = flat[begin + start : min(begin + start + width, end)]
                    mine[part * width :][: piece.size] = piece
                self._mpi.Barrier()
                for part, out in outs.items():
                    piece = out[start : start + width]
                    staged = [window[part * width :][: piece.size] for window in windows]
                    reduce_into(piece, staged, op, dtype, divisor=divisor)
        self._mpi.Barrier()  # everyone has read: the caller may write again

    def _pull(self, sources: list[_Source] | None, flat: np.ndarray, pulls: Sequence[Pull], longest: int) -> None:
        """`longest`: the bytes of the longest rank's array."""
        if sources is not None:
            for peer, start, target in pulls:
                sources[peer].copy(start, target)
        else:
            mine = flat.view(np.uint8)
            for turn, begin in enumerate(range(0, longest, _STAGE_BYTES)):
                windows = self._staging(turn, _STAGE_BYTES)
                piece = mine[begin : begin + _STAGE_BYTES]
                windows[self._rank][: piece.size] = piece
                self._mpi.Barrier()
                for peer, start, target in pulls:
                    first = start * target.itemsize
                    low, high = max(first, begin), min(first + target.nbytes, begin + _STAGE_BYTES)
                    if low < high:
                        target.view(np.uint8)[low - first : high - first] = windows[peer][low - begin : high - begin]
        self._mpi.Barrier()

    def _staging(self, turn: int, nbytes: int) -> list[np.ndarray]:
        """Each rank's staging area of this turn. There are two in turn, so that one barrier a window is enough."""
        if not self._windows or self._windows[0][0].size < nbytes:
            self._windows = [self._own.peers(self._own.empty(max(nbytes, _STAGE_BYTES))) for _ in range(2)]
        return [window[:nbytes] for window in self._windows[turn % 2]]

    def _others(self, whole: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """The other ranks' equal parts of `whole`."""
        count = whole.size // self._size
        return [(peer, whole[peer * count :][:count]) for peer in range(self._size) if peer != self._rank]
