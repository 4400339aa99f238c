"""Carries out schedules by MPI messages, on flat arrays in host memory, or in GPU memory if MPI accepts its addresses.

A message is cut into segments, so that one segment is added while the next one arrives, and scratch memory has few segments. The
messages of a schedule on arrays at given addresses are prepared once, as persistent requests, and kept for the next call: training
reduces the same buffers in every step.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.arrays import reduction
from collectives.arrays.buffer import address_of
from collectives.arrays.dtypes import DType
from collectives.arrays.reduction import Arithmetic
from collectives.schedules import Step
from collectives.transports.segments import SEGMENT_BYTES
from collectives.transports.traffic import to_other_nodes

_NUM_INCOMING = 2  # segments in the scratch memory: one arrives while the other is added
_MAX_REQUESTS = 1 << 12  # the most persistent requests that are kept
_TAG = 1  # of lane 0; `Messages` uses tags from 256 on


class Chunk(NamedTuple):
    """The place of a chunk of a schedule: elements `begin` to `end` of the array with number `array`."""

    array: int
    begin: int
    end: int


class ChunkPlan(NamedTuple):
    """A rank's steps of a schedule on given arrays. `chunks`: their places, with the same lengths on all ranks.

    `sums`: the places of the sums, if a sum is not written to the place of its chunk. Then each chunk is a message of its own.
    """

    steps: Sequence[Step]
    chunks: Sequence[Chunk]
    sums: Sequence[Chunk] | None = None


class _Receive(NamedTuple):
    request: Any
    place: Chunk
    operand: Chunk  # added to the segment that arrives; the sum goes to `place`
    incoming: np.ndarray | None  # scratch memory in which a segment arrives that is then added
    is_first: bool  # the arriving segment is the first operand; decided by rank, so that ranks that exchange get the same bits (-0.0)


class _PreparedStep(NamedTuple):
    sends: list[Any]
    receives: list[_Receive]
    is_exchange: bool  # each arriving segment is added to the segment that is being sent


class _Prepared(NamedTuple):
    steps: list[_PreparedStep]
    num_requests: int
    network_bytes: int  # that a run sends to other nodes


class Executor:
    """Runs schedules on the ranks of `mpi`, for one thread at a time. `arithmetic`: for the kind of memory of its arrays.

    `away`: the ranks on other nodes.
    """

    def __init__(self, mpi: Any, arithmetic: Arithmetic = reduction, *, away: Collection[int]) -> None:
        self._mpi, self.arithmetic, self._away = mpi, arithmetic, away
        self._kept: OrderedDict[Hashable, _Prepared] = OrderedDict()
        self._num_kept = 0
        self._scratch: dict[int, np.ndarray] = {}  # by lane

    def run(
        self,
        key: Hashable,
        arrays: Sequence[np.ndarray],
        plan: Callable[[], ChunkPlan],
        op: str,
        dtype: DType,
        lane: int = 0,
    ) -> Iterator[None]:
        """Carry out this rank's steps of a schedule on the chunks of `arrays`, in place; yields when a step's messages have started.

        `plan` is called once for each `key` and addresses of `arrays`. Runs on different lanes may be unfinished at the same time.
        Messages have elements of `dtype`; each hop adds in `dtype.accumulate` and rounds, as NCCL does.
        """
        key = (key, lane, dtype.name, *((address_of(array), array.size) for array in arrays))
        prepared = self._kept.pop(key, None)
        if prepared is None:
            prepared = self._prepare(arrays, plan(), dtype, lane)
        else:
            self._num_kept -= prepared.num_requests
        for sends, receives, is_exchange in prepared.steps:
            if sends:
                MPI.Prequest.Startall(sends)
            posted = _post(receives, 0, _NUM_INCOMING)
            yield
            for done, (request, place, operand, incoming, is_first) in enumerate(receives):
                posted = _post(receives, posted, done + _NUM_INCOMING)
                request.Wait()
                if is_exchange:
                    sends[done].Wait()
                if incoming is not None:
                    total = arrays[place.array][place.begin : place.end]
                    mine = arrays[operand.array][operand.begin : operand.end]
                    self.arithmetic.reduce_into(total, [incoming, mine] if is_first else [mine, incoming], op, dtype)
            if sends:
                MPI.Request.Waitall(sends)
        to_other_nodes.add(prepared.network_bytes)
        # Kept only after success: an error leaves requests that cannot be started again.
        self._kept[key] = prepared
        self._num_kept += prepared.num_requests
        while self._num_kept > _MAX_REQUESTS:
            self._drop()

    def free(self) -> None:
        """Free all requests."""
        while self._kept:
            self._drop()

    def _drop(self) -> None:
        _, oldest = self._kept.popitem(last=False)
        self._num_kept -= oldest.num_requests
        for step in oldest.steps:
            for request in (*step.sends, *(receive.request for receive in step.receives)):
                request.Free()

    def _prepare(self, arrays: Sequence[np.ndarray], plan: ChunkPlan, dtype: DType, lane: int) -> _Prepared:
        addresses = [address_of(array) for array in arrays]
        segment = SEGMENT_BYTES // dtype.itemsize
        prepared, num_requests, network_bytes = [], 0, 0

        def memory(place: Chunk) -> list[Any]:
            # Memory by address, because a request must not keep the caller's array alive.
            start = addresses[place.array] + place.begin * dtype.itemsize
            return [MPI.memory.fromaddress(start, (place.end - place.begin) * dtype.itemsize), MPI.BYTE]

        now = list(plan.chunks)  # the current place of each chunk
        merge = plan.sums is None
        for send, recv in plan.steps:
            sends, receives = [], []
            if send is not None:
                for place in _segments(now, send.chunk, send.count, segment, merge):
                    sends.append(self._mpi.Send_init(memory(place), send.peer, _TAG + lane))
                    if send.peer in self._away:
                        network_bytes += (place.end - place.begin) * dtype.itemsize
            if recv is not None:
                operands = list(_segments(now, recv.chunk, recv.count, segment, merge))
                if recv.reduce and plan.sums is not None:
                    for chunk in range(recv.chunk, recv.chunk + recv.count):
                        now[chunk % len(now)] = plan.sums[chunk % len(now)]
                places = list(_segments(now, recv.chunk, recv.count, segment, merge))
                for i, (place, operand) in enumerate(zip(places, operands, strict=True)):
                    incoming = None
                    if recv.reduce:
                        incoming = self._incoming(lane, i % _NUM_INCOMING).view(dtype.numpy)[: place.end - place.begin]
                        target = [incoming.view(np.uint8), MPI.BYTE]
                    else:
                        target = memory(place)
                    request = self._mpi.Recv_init(target, recv.peer, _TAG + lane)
                    receives.append(_Receive(request, place, operand, incoming, recv.peer < self._mpi.rank))
            is_exchange = send is not None and recv is not None and recv.reduce and send[1:] == (recv.chunk, recv.count)
            prepared.append(_PreparedStep(sends, receives, is_exchange))
            num_requests += len(sends) + len(receives)
        return _Prepared(prepared, num_requests, network_bytes)

    def _incoming(self, lane: int, which: int) -> np.ndarray:
        if lane not in self._scratch:
            self._scratch[lane] = self.arithmetic.empty(_NUM_INCOMING * SEGMENT_BYTES, np.dtype(np.uint8))
        return self._scratch[lane][which * SEGMENT_BYTES :][:SEGMENT_BYTES]


def _post(receives: Sequence[_Receive], posted: int, end: int) -> int:
    """Start receives up to number `end`, and those after it that need no scratch memory. The first `posted` have been started."""
    while posted < len(receives) and (receives[posted].incoming is None or posted < end):
        receives[posted].request.Start()
        posted += 1
    return posted


def _segments(chunks: Sequence[Chunk], first: int, count: int, segment: int, merge: bool) -> Iterator[Chunk]:
    """The elements of `count` chunks from `first` on (chunk 0 follows the last one), in pieces of at most `segment` elements.

    With `merge`, chunks that are adjacent in memory are joined.
    """
    array, begin, end = 0, 0, 0
    for i in range(first, first + count):
        chunk = chunks[i % len(chunks)]
        if merge and (chunk.array, chunk.begin) == (array, end):
            end = chunk.end
        else:
            yield from _cut(array, begin, end, segment)
            array, begin, end = chunk
    yield from _cut(array, begin, end, segment)


def _cut(array: int, begin: int, end: int, segment: int) -> Iterator[Chunk]:
    for start in range(begin, end, segment):
        yield Chunk(array, start, min(start + segment, end))
