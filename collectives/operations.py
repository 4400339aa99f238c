"""The collectives of a Communicator: check the arguments, choose the algorithm, hand over to its transport.

Every operation goes the same way: `Buffer` views of its arrays, `_begin`, the transport of the chosen algorithm, `result()`.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from collectives.arrays import Buffer
from collectives.diagnosis.record import Entry, Log
from collectives.dtypes import TABLE, DType, effective_op
from collectives.plans import Plan, Plans, key_of
from collectives.reduction import copy
from collectives.selection import Selector
from collectives.transports.transport import parts


class Collectives:
    """The operations that all ranks call together. Only as a part of `Communicator`, which sets these attributes.

    Common to all: `algorithm` is "auto" or one of `collectives.selection.ALGORITHMS[operation]`. With `async_op` a Work comes back
    instead of the result, and errors are raised by its `wait()`. Within `group()` an operation is carried out at the group's end.
    """

    mpi: Any
    rank: int
    size: int
    num_nodes: int
    checked: bool
    _memory: Any  # a NodeMemory; None on several nodes
    _group: Any
    _progress: Any
    _devices: Any
    _selector: Selector
    _later: Any
    _plans: Plans
    _keeps_plans: bool
    _log: Log
    _enter: Any
    _transport: Any  # of an algorithm

    def all_reduce(
        self,
        x: Any,
        op: str = "sum",
        *,
        algorithm: str = "auto",
        accumulate: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Every rank's `x` becomes the reduction of all ranks' `x`. In place; returns `x`, or a Work with `async_op`.

        `op`: sum, avg, prod, max, min. The same bits on all ranks. fp16 and bf16 are added in fp32: rounded once within a node's
        memory and by "mpi", at every hop by the other algorithms unless `accumulate="fp32"` sends fp32.
        """
        if async_op or self._group is not None:
            return self._later(
                async_op, Collectives.all_reduce, x, op, algorithm=algorithm, accumulate=accumulate, result=x
            )
        key = self._key("all_reduce", x, None, op, algorithm, accumulate)
        if key is not None and self._repeat(key):
            return x
        b = Buffer(x, "x", writable=True)
        raw = effective_op(b.dtype, op)
        if b.device is not None and self._devices.all_reduce(b, op, algorithm, accumulate):
            return b.result()
        with self._begin("all_reduce", b, algorithm, op=op, accumulate=accumulate) as call:
            flat, dtype = _wide(b, call.algorithm, accumulate)
            self._transport(call.algorithm).all_reduce(flat, raw, dtype)
            self._plan(key, call, flat, raw, dtype)
        if dtype is not b.dtype:
            copy(b.flat, flat)
        return b.result()

    def all_gather(
        self, out: Any, x: Any, *, counts: Sequence[int] | None = None, algorithm: str = "auto", async_op: bool = False
    ) -> Any:
        """`out` becomes all ranks' `x`, one after the other in order of rank. Returns `out`, or a Work with `async_op`.

        `counts`: elements of each rank where they differ. `x` may be its own place in `out`. Where `out` is this communicator's
        `shared` array, a rank writes its part once and that is all.
        """
        if async_op or self._group is not None:
            return self._later(async_op, Collectives.all_gather, out, x, counts=counts, algorithm=algorithm, result=out)
        key = self._key("all_gather", x, out, algorithm) if counts is None else None
        if key is not None and self._repeat(key):
            return out
        src, dst = Buffer(x, "x"), Buffer(out, "out", write_only=True)
        counts = self._counts("all_gather", counts, part=("x", src), whole=("out", dst))
        in_place = self._in_place("all_gather", counts, part=("x", src), whole=("out", dst))
        if dst.device is not None and self._devices.all_gather(dst, src, counts, algorithm):
            return dst.result()
        with self._begin("all_gather", dst, algorithm, counts=counts) as call:
            self._transport(call.algorithm).all_gather(dst.flat, src.flat, counts)
            if not in_place:
                self._plan(key, call, dst.flat, src.flat, counts)
        return dst.result()

    def reduce_scatter(
        self,
        out: Any,
        x: Any,
        op: str = "sum",
        *,
        counts: Sequence[int] | None = None,
        algorithm: str = "auto",
        accumulate: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """`out` becomes this rank's part of the reduction of all ranks' `x`. Returns `out`, or a Work with `async_op`.

        `counts`: elements of each rank's part where they differ. `out` may be its own place in `x`; else `x` is left as it is.
        `x` may be written again after the call. `op`, `accumulate`: as of `all_reduce`.
        """
        if async_op or self._group is not None:
            options = {"counts": counts, "algorithm": algorithm, "accumulate": accumulate}
            return self._later(async_op, Collectives.reduce_scatter, out, x, op, **options, result=out)
        key = self._key("reduce_scatter", x, out, op, algorithm, accumulate) if counts is None else None
        if key is not None and self._repeat(key):
            return out
        src, dst = Buffer(x, "x"), Buffer(out, "out", write_only=True)
        raw = effective_op(src.dtype, op)
        counts = self._counts("reduce_scatter", counts, part=("out", dst), whole=("x", src))
        in_place = self._in_place("reduce_scatter", counts, part=("out", dst), whole=("x", src))
        if dst.device is not None and self._devices.reduce_scatter(dst, src, op, counts, algorithm, accumulate):
            return dst.result()
        with self._begin("reduce_scatter", src, algorithm, op=op, counts=counts, accumulate=accumulate) as call:
            flat, dtype = _wide(src, call.algorithm, accumulate)
            mine = dst.flat if dtype is src.dtype else np.empty(dst.flat.size, dtype.numpy)
            self._transport(call.algorithm).reduce_scatter(mine, flat, raw, counts, dtype)
            if not in_place:
                self._plan(key, call, mine, flat, raw, counts, dtype)
        if dtype is not src.dtype:
            copy(dst.flat, mine)
        return dst.result()

    def broadcast(self, x: Any, root: int = 0, *, algorithm: str = "auto", async_op: bool = False) -> Any:
        """Every rank's `x` becomes the root's. In place; returns `x`, or a Work with `async_op`."""
        if async_op or self._group is not None:
            return self._later(async_op, Collectives.broadcast, x, root, algorithm=algorithm, result=x)
        key = self._key("broadcast", x, None, root, algorithm)
        if key is not None and self._repeat(key):
            return x
        b = Buffer(x, "x", write_only=self.rank != root)
        if b.device is not None and self._devices.broadcast(b, self._root("broadcast", root), algorithm):
            return b.result()
        with self._begin("broadcast", b, algorithm, root=root) as call:
            self._transport(call.algorithm).broadcast(b.flat, root)
            self._plan(key, call, b.flat, root)
        return b.result()

    def reduce(
        self,
        x: Any,
        root: int = 0,
        op: str = "sum",
        *,
        algorithm: str = "auto",
        accumulate: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """The root's `x` becomes the reduction of all ranks' `x`; the others' stay as they are. Returns `x`, or a Work.

        `op`, `accumulate`: as of `all_reduce`.
        """
        if async_op or self._group is not None:
            return self._later(
                async_op, Collectives.reduce, x, root, op, algorithm=algorithm, accumulate=accumulate, result=x
            )
        b = Buffer(x, "x", writable=self.rank == root)
        raw = effective_op(b.dtype, op)
        if b.device is not None and self._devices.reduce(b, self._root("reduce", root), op, algorithm, accumulate):
            return b.result()
        with self._begin("reduce", b, algorithm, op=op, root=root, accumulate=accumulate) as call:
            flat, dtype = _wide(b, call.algorithm, accumulate)
            self._transport(call.algorithm).reduce(flat, raw, root, dtype)
        if dtype is not b.dtype and self.rank == root:
            copy(b.flat, flat)
        return b.result()

    def gather(self, out: Any, x: Any, root: int = 0, *, algorithm: str = "auto", async_op: bool = False) -> Any:
        """The root's `out` becomes all ranks' `x` in order of rank; the others pass None. Returns `out`, or a Work.

        The root's `x` may be its own place in `out`.
        """
        if async_op or self._group is not None:
            return self._later(async_op, Collectives.gather, out, x, root, algorithm=algorithm, result=out)
        src = Buffer(x, "x")
        dst, counts, in_place = None, [src.size] * self.size, False
        if self.rank == root:
            dst = Buffer(out, "out", write_only=True)
            self._counts("gather", counts, part=("x", src), whole=("out", dst))
            in_place = self._in_place("gather", counts, part=("x", src), whole=("out", dst))
        if src.device is not None and self._devices.gather(dst, src, self._root("gather", root), algorithm):
            return dst and dst.result()
        with self._begin("gather", src, algorithm, root=root) as call:
            if dst is not None and not in_place:
                dst.flat[slice(*parts(counts)[root])] = src.flat
            self._transport(call.algorithm).gather(None if dst is None else dst.flat, src.flat, root)
        return dst and dst.result()

    def scatter(self, out: Any, x: Any, root: int = 0, *, algorithm: str = "auto", async_op: bool = False) -> Any:
        """Every rank's `out` becomes its part of the root's `x`; the others pass None for it. Returns `out`, or a Work.

        The root's `out` may be its own place in `x`.
        """
        if async_op or self._group is not None:
            return self._later(async_op, Collectives.scatter, out, x, root, algorithm=algorithm, result=out)
        dst = Buffer(out, "out", write_only=True)
        src, counts, in_place = None, [dst.size] * self.size, False
        if self.rank == root:
            src = Buffer(x, "x")
            self._counts("scatter", counts, part=("out", dst), whole=("x", src))
            in_place = self._in_place("scatter", counts, part=("out", dst), whole=("x", src))
        if dst.device is not None and self._devices.scatter(dst, src, self._root("scatter", root), algorithm):
            return dst.result()
        with self._begin("scatter", dst, algorithm, root=root) as call:
            if src is not None and not in_place:
                dst.flat[...] = src.flat[slice(*parts(counts)[root])]
            self._transport(call.algorithm).scatter(dst.flat, None if src is None else src.flat, root)
        return dst.result()

    def all_to_all(self, out: Any, x: Any, *, algorithm: str = "auto", async_op: bool = False) -> Any:
        """Part i of `x` goes to rank i; part i of `out` comes from rank i. Equal parts. Returns `out`, or a Work."""
        if async_op or self._group is not None:
            return self._later(async_op, Collectives.all_to_all, out, x, algorithm=algorithm, result=out)
        src, dst = Buffer(x, "x"), Buffer(out, "out", write_only=True)
        if src.dtype != dst.dtype or src.size != dst.size or src.size % self.size:
            raise ValueError(
                f"all_to_all: x has {src.size} elements of {src.dtype.name}, out {dst.size} of {dst.dtype.name}; "
                f"expected the same dtype and number, divisible by {self.size} ranks"
            )
        if _overlap(src, dst):
            raise ValueError("all_to_all: x and out overlap; pass two separate arrays")
        if dst.device is not None and self._devices.all_to_all(dst, src, algorithm):
            return dst.result()
        with self._begin("all_to_all", src, algorithm) as call:
            self._transport(call.algorithm).all_to_all(dst.flat, src.flat)
        return dst.result()

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
        accumulate: str | None = None,
    ) -> Entry:
        """Check what all ranks must agree on, choose the algorithm, and enter the operation in the flight record."""
        if root is not None:
            self._root(operation, root)
        if accumulate not in (None, "fp32"):
            raise ValueError(f"{operation}: accumulate {accumulate!r}; expected 'fp32' or None")
        if self._progress.pending():
            self._progress.flush()
        memory, size, name = self._memory, b.flat.size, b.dtype.name
        number = 0 if memory is None or memory.holds_none else memory.find(b.flat)[0]
        entry = None
        if self.checked:
            options = {
                "op": op,
                "root": root,
                "counts": counts and tuple(counts),
                "algorithm": algorithm,
                "accumulate": accumulate,
            }
            said = ", ".join(f"{name}={value}" for name, value in options.items() if value is not None)
            place = memory.place(b.flat) if number else "private memory"
            entry = self._enter(operation, f"{operation}({size} x {name}, {said}, in {place})", root, op, size, name)
        nbytes = b.flat.nbytes
        if operation in ("gather", "scatter"):
            nbytes *= self.size  # a rank knows its part alone here
        where = "node" if number else "private"
        if entry is None:
            chosen = self._selector.choose(operation, algorithm, dtype=b.dtype, nbytes=nbytes, memory=where)
            return self._log.enter(operation, size, name, op, root, chosen)
        with entry.failing():
            entry.by(self._selector.choose(operation, algorithm, dtype=b.dtype, nbytes=nbytes, memory=where))
        return entry

    def _key(self, operation: str, x: Any, out: Any, *options: Any) -> Hashable:
        """The key of a call's plan; None where none may be used or made."""
        if not self._keeps_plans or self._progress.pending():
            return None
        where = key_of(x)
        also = where if out is None else key_of(out)
        return None if where is None or also is None else (operation, where, also, *options)

    def _repeat(self, key: Hashable) -> bool:
        """Make the call again that `key` has a plan of, if it has one."""
        plan = self._plans.find(key)
        if plan is None:
            return False
        entry = self._log.enter(*plan.entered)
        try:
            plan.call(*plan.arguments)
        except BaseException as error:
            entry.fail(error)
            raise
        entry.leave()  # instead of a `with`, which takes 0.2 us
        return True

    def _plan(self, key: Hashable, call: Entry, *arguments: Any) -> None:
        """Keep the plan of a call that was carried out on `arguments`, in private memory, if its transport makes plans."""
        if key is not None and call.algorithm in ("mpi", "shared"):
            flats = [array for array in arguments if isinstance(array, np.ndarray)]
            private = self._memory is None or not any(self._memory.find(flat)[0] for flat in flats)
            if private and all(flat.size for flat in flats):
                made = self._transport(call.algorithm).plan(call.name, *arguments)
                if made is not None:
                    self._plans.keep(key, Plan(made[0], made[1], call.arguments))

    def _root(self, operation: str, root: int) -> int:
        if not 0 <= root < self.size:
            raise ValueError(f"{operation}: root {root} is outside the {self.size} ranks of this communicator")
        return root

    def _counts(
        self, operation: str, counts: Sequence[int] | None, *, part: tuple[str, Buffer], whole: tuple[str, Buffer]
    ) -> Sequence[int]:
        """The elements of each rank's part; ValueError unless `part` and `whole` have the sizes and the dtype that follow."""
        (part_name, small), (whole_name, large) = part, whole
        if counts is None:
            counts = [small.size] * self.size
            if large.size == small.size * self.size and small.dtype is large.dtype:
                return counts
        if len(counts) != self.size or min(counts) < 0:
            raise ValueError(
                f"{operation}: {len(counts)} counts, the smallest {min(counts, default=0)}; expected {self.size} numbers of elements "
                "from 0 on, one a rank"
            )
        if small.size != counts[self.rank] or large.size != sum(counts):
            raise ValueError(
                f"{operation}: {part_name} has {small.size} elements and {whole_name} {large.size}; expected "
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
        if not _overlap(small, large):
            return False
        if small.address - large.address != sum(counts[: self.rank]) * small.dtype.itemsize:
            raise ValueError(
                f"{operation}: {part_name} overlaps {whole_name}, but is not rank {self.rank}'s place in it; pass that, or a copy"
            )
        return True


def _overlap(one: Buffer, other: Buffer) -> bool:
    """Whether two arrays have elements in common."""
    if one.device is None and other.device is None:
        return np.may_share_memory(one.flat, other.flat)
    if one.device is None or other.device is None:
        return False
    at, begin = one.device.address, other.device.address
    return at < begin + other.device.nbytes and begin < at + one.device.nbytes


def _wide(b: Buffer, algorithm: str, accumulate: str | None) -> tuple[np.ndarray, DType]:
    """The array to reduce and its dtype: a copy in fp32 where that is to travel. Within a node and by "mpi" it adds in fp32 anyway."""
    if accumulate is None or not b.dtype.is_half or algorithm in ("mpi", "shared"):
        return b.flat, b.dtype
    wide = np.empty(b.flat.size, np.float32)
    copy(wide, b.flat)
    return wide, TABLE["float32"]
