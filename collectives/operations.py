"""The collectives of a Communicator: check the arguments, choose the algorithm, hand over to a transport.

Every operation goes the same way: `Buffer` views of its arrays, `_begin`, one of the algorithms of selection.py, `_end`.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from collectives import diagnosis
from collectives.arrays import Buffer
from collectives.dtypes import effective_op
from collectives.reduction import divide
from collectives.schedules import BUILDERS, Step
from collectives.selection import choose
from collectives.work import Work


class Collectives:
    """The operations that all ranks call together. Only as a part of `Communicator`, which sets these attributes."""

    mpi: Any
    rank: int
    size: int
    checked: bool
    _transport: Any
    _memory: Any  # a NodeMemory; None on several nodes
    _programs: dict[tuple[str, str, int], tuple[int, tuple[Step, ...]]]

    def all_reduce(self, x: Any, op: str = "sum", *, algorithm: str = "auto", async_op: bool = False) -> Any:
        """Every rank's `x` becomes the reduction of all ranks' `x`. In place; returns `x`, or a Work with `async_op`.

        `op`: sum, avg, prod, max, min. The same bits on all ranks. fp16 and bf16 are added in fp32: rounded once within a node's
        memory and by "mpi", at every hop by "ring" and "tree".
        """
        b = Buffer(x, "x", writable=True)
        raw = effective_op(b.dtype, op)
        readable = self._memory is not None and self._memory.is_readable(b.flat)
        algorithm = self._begin("all_reduce", b, algorithm, op=op, in_node_memory=readable)
        if algorithm == "mpi":
            started = self._transport.all_reduce(self.mpi, b.flat, raw, b.dtype, async_op)
            return self._end(x, b, async_op, *started)
        if algorithm == "shared":
            assert self._memory is not None
            self._memory.all_reduce(b.flat, raw, b.dtype)
        else:
            num_chunks, steps = self._program("all_reduce", algorithm)
            self._transport.execute(steps, self.mpi, _cut(b.flat, num_chunks), raw, b.dtype)
            if op == "avg":
                divide(b.flat, self.size, b.dtype)
        return self._end(x, b, async_op)

    def all_gather(
        self, out: Any, x: Any, *, counts: Sequence[int] | None = None, algorithm: str = "auto", async_op: bool = False
    ) -> Any:
        """`out` becomes all ranks' `x`, one after the other in order of rank. Returns `out`, or a Work with `async_op`.

        `counts`: elements of each rank where they differ. `x` may be its own place in `out`. Where `out` is this communicator's
        `shared` array, a rank writes its part once and that is all.
        """
        src, dst = Buffer(x, "x"), Buffer(out, "out", writable=True)
        counts = self._counts("all_gather", counts, part=("x", src), whole=("out", dst))
        in_place = self._in_place("all_gather", counts, part=("x", src), whole=("out", dst))
        shared = self._memory is not None and self._memory.is_shared(dst.flat)
        algorithm = self._begin("all_gather", dst, algorithm, counts=counts, in_node_memory=shared)
        if algorithm == "shared":
            assert self._memory is not None
            self._memory.all_gather(dst.flat, src.flat, counts)
            return self._end(out, dst, async_op)
        chunks = _cut(dst.flat, counts=counts)
        if not in_place:
            chunks[self.rank][...] = src.flat
        if algorithm == "mpi":
            return self._end(out, dst, async_op, self._transport.all_gather(self.mpi, dst.flat, counts, async_op))
        _, steps = self._program("all_gather", algorithm)
        self._transport.execute(steps, self.mpi, chunks, "sum", dst.dtype)
        return self._end(out, dst, async_op)

    def reduce_scatter(
        self,
        out: Any,
        x: Any,
        op: str = "sum",
        *,
        counts: Sequence[int] | None = None,
        algorithm: str = "auto",
        async_op: bool = False,
    ) -> Any:
        """`out` becomes this rank's part of the reduction of all ranks' `x`. Returns `out`, or a Work with `async_op`.

        `counts`: elements of each rank's part where they differ. `out` may be its own place in `x`; else `x` is left as it is.
        `x` may be written again after the call.
        """
        src, dst = Buffer(x, "x"), Buffer(out, "out", writable=True)
        raw = effective_op(src.dtype, op)
        counts = self._counts("reduce_scatter", counts, part=("out", dst), whole=("x", src))
        in_place = self._in_place("reduce_scatter", counts, part=("out", dst), whole=("x", src))
        readable = self._memory is not None and self._memory.is_readable(src.flat)
        algorithm = self._begin("reduce_scatter", src, algorithm, op=op, counts=counts, in_node_memory=readable)
        if algorithm == "mpi":
            flat = src.flat.copy() if in_place else src.flat  # MPI forbids overlapping buffers
            started = self._transport.reduce_scatter(self.mpi, dst.flat, flat, raw, counts, src.dtype, async_op)
            return self._end(out, dst, async_op, *started)
        if algorithm == "shared":
            assert self._memory is not None
            self._memory.reduce_scatter(dst.flat, src.flat, raw, counts, src.dtype)
        else:
            chunks = _cut(src.flat.copy(), counts=counts)  # they come to hold partial sums
            _, steps = self._program("reduce_scatter", algorithm)
            self._transport.execute(steps, self.mpi, chunks, raw, src.dtype)
            dst.flat[...] = chunks[self.rank]
            if op == "avg":
                divide(dst.flat, self.size, dst.dtype)
        return self._end(out, dst, async_op)

    def broadcast(self, x: Any, root: int = 0, *, algorithm: str = "auto", async_op: bool = False) -> Any:
        """Every rank's `x` becomes the root's. In place; returns `x`, or a Work with `async_op`."""
        b = Buffer(x, "x", writable=self.rank != root)
        algorithm = self._begin("broadcast", b, algorithm, root=root)
        if algorithm == "mpi":
            return self._end(x, b, async_op, self._transport.broadcast(self.mpi, b.flat, root, async_op))
        _, steps = self._program("broadcast", algorithm, root)
        self._transport.execute(steps, self.mpi, [b.flat], "sum", b.dtype)
        return self._end(x, b, async_op)

    def reduce(self, x: Any, root: int = 0, op: str = "sum", *, algorithm: str = "auto", async_op: bool = False) -> Any:
        """The root's `x` becomes the reduction of all ranks' `x`; the others' stay as they are. Returns `x`, or a Work."""
        b = Buffer(x, "x", writable=self.rank == root)
        raw = effective_op(b.dtype, op)
        algorithm = self._begin("reduce", b, algorithm, op=op, root=root)
        if algorithm == "mpi":
            started = self._transport.reduce(self.mpi, b.flat, raw, root, b.dtype, async_op)
            return self._end(x, b, async_op, *started)
        # Inner ranks of the tree keep partial sums: not in the caller's array.
        flat = b.flat if self.rank == root else b.flat.copy()
        _, steps = self._program("reduce", algorithm, root)
        self._transport.execute(steps, self.mpi, [flat], raw, b.dtype)
        if op == "avg" and self.rank == root:
            divide(b.flat, self.size, b.dtype)
        return self._end(x, b, async_op)

    def gather(self, out: Any, x: Any, root: int = 0, *, algorithm: str = "auto", async_op: bool = False) -> Any:
        """The root's `out` becomes all ranks' `x` in order of rank; the others pass None. Returns `out`, or a Work.

        The root's `x` may be its own place in `out`.
        """
        src = Buffer(x, "x")
        dst, counts, in_place = None, [src.flat.size] * self.size, False
        if self.rank == root:
            dst = Buffer(out, "out", writable=True)
            self._counts("gather", counts, part=("x", src), whole=("out", dst))
            in_place = self._in_place("gather", counts, part=("x", src), whole=("out", dst))
        self._begin("gather", src, algorithm, root=root)
        if dst is not None and not in_place:
            _cut(dst.flat, counts=counts)[root][...] = src.flat
        flat = None if dst is None else dst.flat
        request = self._transport.gather(self.mpi, flat, src.flat, root, async_op)
        return self._end(out, dst, async_op, request, keep=src)

    def scatter(self, out: Any, x: Any, root: int = 0, *, algorithm: str = "auto", async_op: bool = False) -> Any:
        """Every rank's `out` becomes its part of the root's `x`; the others pass None for it. Returns `out`, or a Work.

        The root's `out` may be its own place in `x`.
        """
        dst = Buffer(out, "out", writable=True)
        src, counts, in_place = None, [dst.flat.size] * self.size, False
        if self.rank == root:
            src = Buffer(x, "x")
            self._counts("scatter", counts, part=("out", dst), whole=("x", src))
            in_place = self._in_place("scatter", counts, part=("out", dst), whole=("x", src))
        self._begin("scatter", dst, algorithm, root=root)
        if src is not None and not in_place:
            dst.flat[...] = _cut(src.flat, counts=counts)[root]
        flat = None if src is None else src.flat
        request = self._transport.scatter(self.mpi, dst.flat, flat, root, async_op)
        return self._end(out, dst, async_op, request, keep=src)

    def all_to_all(self, out: Any, x: Any, *, algorithm: str = "auto", async_op: bool = False) -> Any:
        """Part i of `x` goes to rank i; part i of `out` comes from rank i. Equal parts. Returns `out`, or a Work."""
        src, dst = Buffer(x, "x"), Buffer(out, "out", writable=True)
        if src.dtype != dst.dtype or src.flat.size != dst.flat.size or src.flat.size % self.size:
            raise ValueError(
                f"all_to_all: x has {src.flat.size} elements of {src.dtype.name}, out {dst.flat.size} of {dst.dtype.name}; "
                f"expected the same dtype and number, divisible by {self.size} ranks"
            )
        if np.may_share_memory(src.flat, dst.flat):
            raise ValueError("all_to_all: x and out overlap; pass two separate arrays")
        self._begin("all_to_all", src, algorithm)
        request = self._transport.all_to_all(self.mpi, dst.flat, src.flat, async_op)
        return self._end(out, dst, async_op, request, keep=src)

    # Parts of the operations above

    def _begin(
        self,
        operation: str,
        b: Buffer,
        algorithm: str,
        *,
        op: str | None = None,
        root: int | None = None,
        counts: Sequence[int] | None = None,
        in_node_memory: bool = False,
    ) -> str:
        """Check what all ranks must agree on, and choose the algorithm."""
        if root is not None and not 0 <= root < self.size:
            raise ValueError(f"{operation}: root {root} is outside the {self.size} ranks of this communicator")
        if self.checked:
            options = {"op": op, "root": root, "counts": counts and tuple(counts), "algorithm": algorithm}
            said = ", ".join(f"{name}={value}" for name, value in options.items() if value is not None)
            place = self._memory.place(b.flat) if self._memory is not None and in_node_memory else "private memory"
            diagnosis.compare_calls(self.mpi, f"{operation}({b.flat.size} x {b.dtype.name}, {said}, in {place})")
        return choose(operation, algorithm, dtype=b.dtype, nbytes=b.flat.nbytes, in_node_memory=in_node_memory)

    def _end(
        self,
        result: Any,
        written: Buffer | None,
        async_op: bool,
        request: Any = None,
        finish: Callable[[], None] | None = None,
        keep: Any = None,
    ) -> Any:
        """The operation's `result`, or with `async_op` its Work.

        `finish`: what remains to be done once `request` has ended. `keep`: what MPI reads until then, besides `written`.
        """

        if async_op:
            return Work(result, request, lambda: self._end(result, written, False, finish=finish, keep=keep))
        if finish is not None:
            finish()
        if written is not None:
            written.flush()
        return result

    def _counts(
        self, operation: str, counts: Sequence[int] | None, *, part: tuple[str, Buffer], whole: tuple[str, Buffer]
    ) -> Sequence[int]:
        """The elements of each rank's part; ValueError unless `part` and `whole` have the sizes and the dtype that follow."""
        (part_name, small), (whole_name, large) = part, whole
        if counts is None:
            counts = [small.flat.size] * self.size
        if len(counts) != self.size or min(counts) < 0:
            raise ValueError(
                f"{operation}: counts {tuple(counts)}; expected {self.size} numbers of elements, one a rank"
            )
        if small.flat.size != counts[self.rank] or large.flat.size != sum(counts):
            raise ValueError(
                f"{operation}: {part_name} has {small.flat.size} elements and {whole_name} {large.flat.size}; expected "
                f"{counts[self.rank]} in {part_name} and {sum(counts)} in {whole_name} on {self.size} ranks"
            )
        if small.dtype != large.dtype:
            raise ValueError(f"{operation}: {part_name} is {small.dtype.name}, but {whole_name} is {large.dtype.name}")
        return counts

    def _in_place(
        self, operation: str, counts: Sequence[int], *, part: tuple[str, Buffer], whole: tuple[str, Buffer]
    ) -> bool:
        """Whether `part` is this rank's place in `whole`; ValueError if it overlaps `whole` elsewhere."""
        (part_name, small), (whole_name, large) = part, whole
        if not np.may_share_memory(small.flat, large.flat):
            return False
        place = large.flat[sum(counts[: self.rank]) :]
        if place.ctypes.data != small.flat.ctypes.data:
            raise ValueError(
                f"{operation}: {part_name} overlaps {whole_name}, but is not rank {self.rank}'s place in it; pass that, or a copy"
            )
        return True

    def _program(self, operation: str, algorithm: str, root: int = 0) -> tuple[int, tuple[Step, ...]]:
        """The number of chunks of the operation's schedule, and this rank's steps of it."""
        key = (operation, algorithm, root)
        if key not in self._programs:
            schedule = BUILDERS[operation][algorithm](self.size, root)
            self._programs[key] = (schedule.num_chunks, schedule.program(self.rank))
        return self._programs[key]


def _cut(flat: np.ndarray, num_chunks: int = 1, *, counts: Sequence[int] | None = None) -> list[np.ndarray]:
    """`flat` in consecutive pieces: of `counts` elements, or `num_chunks` as equal as can be."""
    if counts is None:
        bounds = [flat.size * i // num_chunks for i in range(num_chunks + 1)]
    else:
        bounds = [0, *accumulate(counts)]
    return [flat[begin:end] for begin, end in pairwise(bounds)]
