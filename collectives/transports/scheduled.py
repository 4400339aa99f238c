"""A Transport for each of our own algorithms: the executor carries out its schedules."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from collectives.arrays.dtypes import DType, dtype_of
from collectives.schedules import build, goes_in_rounds
from collectives.transports.executor import Chunk, ChunkPlan, Executor
from collectives.transports.overlap import LANES
from collectives.transports.segments import SEGMENT_BYTES
from collectives.transports.transport import Counts, even_parts, parts, put_own_part

_PIPELINE_BYTES = 1 << 18  # of a segment in the pipelined algorithms
_MAX_SEGMENTS = 64
_COPY_BYTES = 1 << 20  # below this size a copy of the array costs less than a message for each chunk


class Scheduled:
    """The operations of `algorithm` (see collectives.schedules) on the ranks of the executor's communicator."""

    def __init__(self, executor: Executor, algorithm: str, *, rank: int, size: int) -> None:
        self._executor, self._algorithm = executor, algorithm
        self._memory = executor.arithmetic
        self._rank, self._size = rank, size
        self.goes_in_rounds, self.num_lanes = goes_in_rounds(algorithm, size), LANES

    def all_reduce(self, flat: np.ndarray, op: str, dtype: DType) -> None:
        _finish(self.all_reduce_steps(flat, op, dtype))

    def reduce_scatter(self, out: np.ndarray, flat: np.ndarray, op: str, counts: Sequence[int], dtype: DType) -> None:
        _finish(self.reduce_scatter_steps(out, flat, op, counts, dtype))

    def all_gather(self, out: np.ndarray, flat: np.ndarray, counts: Sequence[int]) -> None:
        _finish(self.all_gather_steps(out, flat, counts))

    def width(self, num_parts: int, dtype: DType) -> int:
        """The elements in a chunk of each of `num_parts` parts, if a caller cuts arrays into chunks: a segment of bytes in all."""
        return max(SEGMENT_BYTES // (num_parts * dtype.itemsize), 1)

    # The same operations for a caller that works while messages travel: generators that yield when a step's messages have started.
    # Operations on different lanes may be unfinished at the same time.

    def all_reduce_steps(self, flat: np.ndarray, op: str, dtype: DType, lane: int = 0) -> Iterator[None]:
        yield from self._steps("all_reduce", [flat], op, dtype, lane=lane)
        if op == "avg":
            self._memory.divide(flat, self._size, dtype)

    def reduce_scatter_steps(
        self, out: np.ndarray, flat: np.ndarray, op: str, counts: Sequence[int], dtype: DType, lane: int = 0
    ) -> Iterator[None]:
        if flat.nbytes < _COPY_BYTES or self._size == 1:
            partial = self._copy(flat)  # for partial sums
            yield from self._steps("reduce_scatter", [partial], op, dtype, counts=counts, lane=lane)
            begin = sum(counts[: self._rank])
            self._memory.move(out, partial[begin : begin + out.size])
        else:  # Partial sums go to a separate array, final sums directly to `out`. Pages are touched only for sums that are sent on.
            sums = [Chunk(1, begin, end) for begin, end in parts(counts)]
            sums[self._rank] = Chunk(2, 0, out.size)
            arrays = [flat, self._memory.empty(flat.size, flat.dtype), out]
            yield from self._steps("reduce_scatter", arrays, op, dtype, counts=counts, sums=sums, lane=lane)
        if op == "avg":
            self._memory.divide(out, self._size, dtype)

    def all_gather_steps(
        self, out: np.ndarray, flat: np.ndarray, counts: Sequence[int], lane: int = 0
    ) -> Iterator[None]:
        put_own_part(out, flat, counts, self._rank, self._memory)
        yield from self._steps("all_gather", [out], "sum", dtype_of(out.dtype), counts=counts, lane=lane)

    # The other operations

    def broadcast(self, flat: np.ndarray, root: int) -> None:
        self._run("broadcast", [flat], "sum", dtype_of(flat.dtype), root=root)

    def reduce(self, flat: np.ndarray, op: str, root: int, dtype: DType) -> None:
        partial = flat if self._rank == root else self._copy(flat)
        self._run("reduce", [partial], op, dtype, root=root)
        if op == "avg" and self._rank == root:
            self._memory.divide(flat, self._size, dtype)

    def gather(self, out: np.ndarray | None, flat: np.ndarray, root: int) -> None:
        counts = [flat.size] * self._size
        if out is None:  # inner ranks of a tree pass on the parts of other ranks
            out = self._memory.empty(flat.size * self._size, flat.dtype)
            put_own_part(out, flat, counts, self._rank, self._memory)
        self._run("gather", [out], "sum", dtype_of(flat.dtype), root=root, counts=counts)

    def scatter(self, out: np.ndarray, flat: np.ndarray | None, root: int) -> None:
        whole = self._memory.empty(out.size * self._size, out.dtype) if flat is None else flat
        self._run("scatter", [whole], "sum", dtype_of(out.dtype), root=root, counts=[out.size] * self._size)
        if flat is None:
            self._memory.move(out, whole[self._rank * out.size :][: out.size])

    def all_to_all(self, out: np.ndarray, flat: np.ndarray, counts: Counts | None = None) -> None:
        send, recv = counts or Counts.equal(flat.size, self._size)
        target, source = parts(recv)[self._rank], parts(send)[self._rank]
        self._memory.move(out[slice(*target)], flat[slice(*source)])
        self._run("all_to_all", [flat, out], "sum", dtype_of(out.dtype), counts=[*send, *recv])

    def _copy(self, flat: np.ndarray) -> np.ndarray:
        copy = self._memory.empty(flat.size, flat.dtype)
        self._memory.move(copy, flat)
        return copy

    def _run(self, operation: str, arrays: Sequence[np.ndarray], op: str, dtype: DType, **options: Any) -> None:
        _finish(self._steps(operation, arrays, op, dtype, **options))

    def _steps(
        self,
        operation: str,
        arrays: Sequence[np.ndarray],
        op: str,
        dtype: DType,
        *,
        root: int = 0,
        counts: Sequence[int] | None = None,
        sums: Sequence[Chunk] | None = None,
        lane: int = 0,
    ) -> Iterator[None]:
        """The steps on `arrays`, cut into parts of `counts` elements, or into chunks of equal size as the schedule needs.

        `counts`: of the first array's N parts, then of the second's.
        `sums`: the places for the sums of the chunks; then only the first array is cut.
        """
        segments = min(max(arrays[0].nbytes // _PIPELINE_BYTES, 1), _MAX_SEGMENTS)

        def plan() -> ChunkPlan:
            schedule = build(operation, self._algorithm, self._size, root=root, num_segments=segments)
            chunks = [
                Chunk(i, begin, end)
                for i, array in enumerate(arrays if sums is None else arrays[:1])
                for begin, end in (
                    even_parts(array.size, schedule.num_chunks)
                    if counts is None
                    else parts(counts[i * self._size :][: self._size])
                )
            ]
            return ChunkPlan(schedule.program(self._rank), chunks, sums)

        key = operation, self._algorithm, root, segments, counts and tuple(counts)
        return self._executor.run(key, arrays, plan, op, dtype, lane)


def _finish(steps: Iterator[None]) -> None:
    deque(steps, maxlen=0)
