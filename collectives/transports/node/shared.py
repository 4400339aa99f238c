"""Collectives of the ranks of one node, which read each other's arrays directly: every element moves once.

Arrays in node memory (memory.py) are read there. Private arrays are read through the kernel (peer.py), or through the rings of
staged.py if the kernel does not allow that or is slower: see [Note: race]. All operations consist of two steps:

- `reduce_parts`: each rank reads its parts of all ranks' arrays, adds in order of rank and rounds once;
- `pull`: each rank copies the elements that it needs from its peers' arrays.

Before a step each rank writes the place of its array to a board, and all ranks meet. They meet again after it; then arrays may change.

[Note: race] For long private arrays neither way is always faster. Through the rings data pass from cache to cache: twice as fast as
reads through the kernel if the cores are near each other, half as fast if they are not, which in a virtual machine changes within
seconds. Both ways add in order of rank and round once, so the result has the same bits, and each call may take the way that was faster
in recent calls. Rank 0 measures the times and writes its choice to the board, so that all ranks take the same way.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from collectives.arrays.buffer import address_of, unowned
from collectives.arrays.dtypes import DType
from collectives.arrays.reduction import reduce_into
from collectives.transports.node import pulls as exchanges
from collectives.transports.node.meeting import WORDS, NodeMeeting
from collectives.transports.node.memory import NodeMemory
from collectives.transports.node.peer import PeerReader, peer_readers
from collectives.transports.node.posted import Post, Posts
from collectives.transports.node.pulls import ByPulling, Pull
from collectives.transports.node.staged import Staged
from collectives.transports.transport import even_parts, parts

_SCRATCH_BYTES = 1 << 20  # for elements of all ranks that are read before they are added: fits the core's cache
_SAID = 5  # words on the board for each rank: the place of its array, and the way that it would take (rank 0 decides)
_RACE_BYTES = 1 << 20  # the least size of an array for a race
_LAST = 3  # calls by each way whose times count, so that one call that another process delayed does not decide
_TRY_AGAIN = 16  # calls after which the slower way is tried again


class Race:
    """Measures which of two ways, direct (0) or staged (1), was faster in the last calls of a kind: see [Note: race]."""

    def __init__(self) -> None:
        self._seconds: dict[Hashable, tuple[deque[float], deque[float]]] = {}  # times of the last calls by each way
        self._num_calls: Counter[Hashable] = Counter()

    def pick(self, kind: Hashable) -> int:
        """The way for the next call of this kind."""
        direct, windows = (min(seconds, default=0.0) for seconds in self._of(kind))  # without times: try it next
        faster = int(windows < direct)
        return 1 - faster if self._num_calls[kind] % _TRY_AGAIN == _TRY_AGAIN - 1 else faster

    def took(self, kind: Hashable, way: int, seconds: float) -> None:
        """Note that a call by `way` took `seconds`."""
        self._of(kind)[way].append(seconds)
        self._num_calls[kind] += 1

    def _of(self, kind: Hashable) -> tuple[deque[float], deque[float]]:
        if kind not in self._seconds:
            self._seconds[kind] = deque(maxlen=_LAST), deque(maxlen=_LAST)
        return self._seconds[kind]


class _Source:
    """A rank's array, as the other ranks see it: a view of the array, or its address and the reader of that rank's memory."""

    __slots__ = ("_address", "_reader", "view")

    def __init__(self, view: np.ndarray | None, reader: PeerReader | None = None, address: int = 0) -> None:
        self.view, self._reader, self._address = view, reader, address

    def copy(self, start: int, target: np.ndarray) -> None:
        """Fill `target` with the elements from `start` on."""
        if self.view is not None:
            target[...] = self.view[start : start + target.size]
        elif target.size:
            assert self._reader is not None
            self._reader.read(address_of(target), self._address + start * target.itemsize, target.nbytes)

    def elements(self, start: int, scratch: np.ndarray) -> np.ndarray:
        """As many elements from `start` on as `scratch` holds: a view of the array, or a copy in `scratch`."""
        if self.view is not None:
            return self.view[start : start + scratch.size]
        self.copy(start, scratch)
        return scratch


class Shared(ByPulling):
    """The collectives of the ranks of `mpi`, all on one node. `memory`: holds their arrays in node memory. Making it is collective.

    Arrays are flat and have the same length on all ranks unless stated otherwise. OSError if node memory cannot be allocated.
    """

    def __init__(self, mpi: Any, memory: NodeMemory, staged: Staged) -> None:
        self._rank, self._size = mpi.rank, mpi.size
        self._memory, self._staged = memory, staged
        # Two boards, used in turn: a rank that meets for the next operation has read the board of this operation.
        lengths = [WORDS * mpi.size, _SAID * mpi.size, _SAID * mpi.size]
        words = memoryview(NodeMemory(mpi).shared(8 * sum(lengths), or_anonymous=True)).cast("Q")  # type: ignore[arg-type]
        meeting, *self._boards = (words[slice(*part)] for part in parts(lengths))
        self._meet = NodeMeeting(mpi, meeting).meet
        self._readers = peer_readers(mpi)
        self.posts = Posts(mpi, memory)
        self._race = Race()
        self._running: tuple[Hashable, int, float] | None = None  # kind, way, start time of a call in the race
        each = max(_SCRATCH_BYTES // mpi.size // 16, 1) * 16  # bytes: whole elements of any dtype
        self._scratch = np.empty((mpi.size, each), np.uint8)

    @property
    def reads_private(self) -> bool:
        """Whether the kernel lets these ranks read each other's private memory."""
        return self._readers is not None

    # The operations that are not in `ByPulling`

    def all_reduce(self, flat: np.ndarray, op: str, dtype: DType) -> None:
        """Each rank writes the sum of its slice to its own array, then copies the other slices from their owners."""
        bounds = even_parts(flat.size, self._size)
        sources = self._show(flat, "all_reduce")
        if sources is None:
            self._staged.all_reduce(flat, op, dtype)
            self._arrived()
            return
        # No other rank reads this slice of this rank's array, so the sum may be written there at once.
        begin, end = bounds[self._rank]
        self._add(flat[begin:end], sources, begin, op, dtype)
        self._meet()
        for peer, (begin, end) in enumerate(bounds):
            if peer != self._rank:
                sources[peer].copy(begin, flat[begin:end])
        self._meet()
        self._arrived()

    def reduce(self, flat: np.ndarray, op: str, root: int, dtype: DType) -> None:
        """Each rank reduces a slice, which the root then copies. The arrays of the other ranks do not change."""
        bounds = even_parts(flat.size, self._size)
        begin, end = bounds[self._rank]
        mine = flat[begin:end] if self._rank == root else np.empty(end - begin, flat.dtype)
        self.reduce_parts(flat, bounds, {self._rank: mine}, op, dtype)
        pulls = [Pull(peer, 0, flat[slice(*part)]) for peer, part in enumerate(bounds) if peer != root]
        self.pull(mine, pulls if self._rank == root else [], max(end - begin for begin, end in bounds))

    def reduce_scatter(self, out: np.ndarray, flat: np.ndarray, op: str, counts: Sequence[int], dtype: DType) -> None:
        """Each rank adds its part of all arrays. `out` may be this rank's part of `flat`."""
        self.reduce_parts(flat, parts(counts), {self._rank: out}, op, dtype)

    def all_gather(self, out: np.ndarray, flat: np.ndarray, counts: Sequence[int]) -> None:
        """If `out` is a `shared` array, each rank only writes its own part, unless `flat` is that part."""
        self.collect(out, *exchanges.all_gather(self._rank, out, flat, counts))

    def plan(self, operation: str, *arguments: Any) -> tuple[Callable[..., None], tuple[Any, ...]] | None:
        """An all-gather of a short array into a `shared` array, as one prepared call; None for other operations."""
        if operation != "all_gather":
            return None
        out, flat, counts = arguments
        if not self._memory.is_one_array(self._memory.find(out)[0]) or out.nbytes > _RACE_BYTES:
            return None
        begin, end = parts(counts)[self._rank]
        return self._put, (unowned(out[begin:end]), unowned(flat))

    def _put(self, target: np.ndarray, source: np.ndarray) -> None:
        self._meet()  # no rank still reads the previous contents
        target[...] = source
        self._meet()

    def post_reduce_scatter(
        self, out: np.ndarray, flat: np.ndarray, op: str, counts: Sequence[int], dtype: DType
    ) -> Post:
        """`reduce_scatter` of an array that `posts` takes, without a wait for another rank."""
        begin = sum(counts[: self._rank])

        def add(arrays: Sequence[np.ndarray]) -> None:
            self._add(out, [_Source(array.view(flat.dtype)) for array in arrays], begin, op, dtype)

        return self.posts.post(flat, add)

    def post_parts(self, flat: np.ndarray, part: tuple[int, int], use: Callable[[list[np.ndarray]], None]) -> Post:
        """`use` will read the elements `part` of all ranks' arrays, in order of rank. `posts` takes `flat`."""
        begin, end = part
        return self.posts.post(flat, lambda arrays: use([array.view(flat.dtype)[begin:end] for array in arrays]))

    def use_parts(
        self, flat: np.ndarray, bounds: Sequence[tuple[int, int]], use: Callable[[list[list[np.ndarray]]], None]
    ) -> None:
        """`use` reads, for each of this rank's `bounds`, these elements of all ranks' arrays, in order of rank.

        It reads node memory where it is; of private arrays it gets copies.
        """
        sources = self._show(flat, "parts")
        views = [source.view for source in sources or [] if source.view is not None]
        if len(views) == self._size:
            self._arrived()
            try:
                use([[view[slice(*part)] for view in views] for part in bounds])
            finally:
                self._meet()  # also after an error of `use`, for which the other ranks need not wait
            return
        copies = [[np.empty(end - begin, flat.dtype) for _ in range(self._size)] for begin, end in bounds]
        pulls = [
            Pull(peer, begin, target)
            for (begin, _), targets in zip(bounds, copies, strict=True)
            for peer, target in enumerate(targets)
        ]
        self._pull(sources, flat, pulls, flat.size)
        use(copies)

    # The two steps

    def reduce_parts(
        self,
        flat: np.ndarray,
        bounds: Sequence[tuple[int, int]],
        outs: Mapping[int, np.ndarray],
        op: str,
        dtype: DType,
    ) -> None:
        """`bounds`: of the parts of `flat`. `outs`: by the number of a part, the arrays into which this rank reduces that part."""
        sources = self._show(flat, "reduce_parts")
        if sources is None:
            self._staged.reduce_parts(flat, bounds, outs, op, dtype)
        else:
            for part, out in outs.items():
                self._add(out, sources, bounds[part][0], op, dtype)
            self._meet()  # all ranks have read, so the caller may write its array again
        self._arrived()

    def pull(self, shown: np.ndarray, pulls: Sequence[Pull], longest: int) -> None:
        self._pull(self._show(shown, "pull"), shown, pulls, longest)

    def _pull(self, sources: list[_Source] | None, shown: np.ndarray, pulls: Sequence[Pull], longest: int) -> None:
        """`pull` after `_show`."""
        if sources is None:
            self._staged.pull(shown, pulls, longest)
        else:
            for peer, start, target in pulls:
                sources[peer].copy(start, target)
            self._meet()
        self._arrived()

    def collect(self, out: np.ndarray, shown: np.ndarray, pulls: Sequence[Pull], longest: int) -> None:
        """`pull` into parts of `out`; if `out` is a `shared` array, each rank only writes its own part."""
        if not self._memory.is_one_array(self._memory.find(out)[0]):
            self.pull(shown, pulls, longest)
            return
        # Both meetings always take place, because only some of the ranks may find their part already in its place.
        self._meet()  # no rank still reads the previous contents
        for peer, start, part in pulls:  # with several nodes, a rank has a part of each node
            if peer == self._rank:
                part[...] = shown[start : start + part.size]
        self._meet()

    # Helpers

    def _show(self, flat: np.ndarray, idea: str) -> list[_Source] | None:
        """Wait for all ranks. Returns every rank's array in order of rank, or None if the ranks must use `Staged`."""
        board = self._boards[0]
        self._boards.reverse()
        at = _SAID * self._rank
        kind = (idea, flat.nbytes.bit_length())
        board[at], board[at + 1] = self._memory.find(flat)
        board[at + 2], board[at + 3] = flat.nbytes, address_of(flat)
        board[at + 4] = self._race.pick(kind) if flat.nbytes >= _RACE_BYTES else 0
        self._meet()
        said = [board[at : at + _SAID].tolist() for at in range(0, _SAID * self._size, _SAID)]
        # A rank that passes an array still has its allocation mapped. If all arrays are of one allocation, every rank can read them.
        number, way, longest = said[0][0], said[0][4], max(nbytes for _, _, nbytes, _, _ in said)
        of_one = number != 0 and all(other == number for other, _, _, _, _ in said)
        if self._readers is None and not of_one:
            return None
        if not of_one and longest >= _RACE_BYTES:
            self._running = (kind, way, time.perf_counter())
            if way == 1:
                return None
        sources = []
        for rank, (number, place, nbytes, address, _) in enumerate(said):
            view = flat if rank == self._rank else None
            if of_one and view is None:
                view = self._memory.view(number, place, nbytes).view(flat.dtype)  # type: ignore[union-attr]
            sources.append(_Source(view, self._readers[rank] if self._readers else None, address))
        return sources

    def _arrived(self) -> None:
        """Note the time of a call in the race that `_show` began."""
        if self._running is not None:
            kind, way, start = self._running
            self._race.took(kind, way, time.perf_counter() - start)
            self._running = None

    def _add(self, out: np.ndarray, sources: Sequence[_Source], begin: int, op: str, dtype: DType) -> None:
        """`out` becomes the reduction of `out.size` elements of all arrays, from element `begin` on."""
        divisor = self._size if op == "avg" else 1
        scratch = [memory.view(out.dtype) for memory in self._scratch]
        block = scratch[0].size
        for start in range(0, out.size, block):
            target = out[start : start + block]
            addends = [
                source.elements(begin + start, memory[: target.size])
                for source, memory in zip(sources, scratch, strict=True)
            ]
            reduce_into(target, addends, op, dtype, divisor=divisor)
