"""The collectives of a Communicator: check the arguments, choose the algorithm, hand over to its transport.

Every operation goes the same way: the plan of the same call made before; else `Buffer` views of its arrays and whether they fit, which
is all that can be wrong on this rank; then `carry_out`: the transport of the chosen algorithm, and `result()`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.arrays.buffer import Buffer
from collectives.arrays.dtypes import TABLE, DType, effective_op
from collectives.arrays.reduction import copy
from collectives.communicator.arguments import fit, overlap, rank_of
from collectives.communicator.calls import Call, Calls
from collectives.selection.selector import WITHIN_NODE
from collectives.transports.transport import parts


class Collectives(Calls):
    """The operations that all ranks call together. Only as a part of `Communicator`.

    Common to all: `algorithm` is "auto" or one of `collectives.selection.selector.ALGORITHMS[operation]`. With `async_op` a Work comes
    back instead of the result. Within `group()` an operation is carried out at the group's end. Wrong arguments are errors of the call.
    """

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
        key = None if async_op else self._key(x, None, ("all_reduce", op, algorithm, accumulate))
        if key is not None and self._repeat(key):
            return x
        b = Buffer(x, "x", writable=True)
        raw = effective_op(b.dtype, op)
        call = Call("all_reduce", (b,), algorithm, op=op, accumulate=accumulate)

        def carry_out(comm: Collectives) -> Any:
            if b.device is not None and comm._devices.all_reduce(b, op, algorithm, accumulate):
                return b.result()
            with comm._begin(call) as entry:
                flat, dtype = _wide(b, entry.algorithm, accumulate)
                comm._transport(entry.algorithm).all_reduce(flat, raw, dtype)
                comm._plan(key, entry, flat, raw, dtype)
            if dtype is not b.dtype:
                copy(b.flat, flat)
            return b.result()

        return self._issue(async_op, call, carry_out, x)

    def all_gather(
        self, out: Any, x: Any, *, counts: Sequence[int] | None = None, algorithm: str = "auto", async_op: bool = False
    ) -> Any:
        """`out` becomes all ranks' `x`, one after the other in order of rank. Returns `out`, or a Work with `async_op`.

        `counts`: elements of each rank where they differ. `x` may be its own place in `out`. Where `out` is this communicator's
        `shared` array, a rank writes its part once and that is all.
        """
        key = None if async_op or counts is not None else self._key(x, out, ("all_gather", algorithm))
        if key is not None and self._repeat(key):
            return out
        src, dst = Buffer(x, "x"), Buffer(out, "out", write_only=True)
        lengths, in_place = fit("all_gather", counts, self.rank, self.size, part=("x", src), whole=("out", dst))
        call = Call("all_gather", (dst, src), algorithm, counts=lengths)

        def carry_out(comm: Collectives) -> Any:
            if dst.device is not None and comm._devices.all_gather(dst, src, lengths, algorithm):
                return dst.result()
            with comm._begin(call) as entry:
                comm._transport(entry.algorithm).all_gather(dst.flat, src.flat, lengths)
                if not in_place:
                    comm._plan(key, entry, dst.flat, src.flat, lengths)
            return dst.result()

        return self._issue(async_op, call, carry_out, out)

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
        key = None
        if not async_op and counts is None:
            key = self._key(x, out, ("reduce_scatter", op, algorithm, accumulate))
        if key is not None and self._repeat(key):
            return out
        src, dst = Buffer(x, "x"), Buffer(out, "out", write_only=True)
        raw = effective_op(src.dtype, op)
        lengths, in_place = fit("reduce_scatter", counts, self.rank, self.size, part=("out", dst), whole=("x", src))
        call = Call("reduce_scatter", (src, dst), algorithm, op=op, counts=lengths, accumulate=accumulate)

        def carry_out(comm: Collectives) -> Any:
            if dst.device is not None and comm._devices.reduce_scatter(dst, src, op, lengths, algorithm, accumulate):
                return dst.result()
            with comm._begin(call) as entry:
                flat, dtype = _wide(src, entry.algorithm, accumulate)
                mine = dst.flat if dtype is src.dtype else np.empty(dst.flat.size, dtype.numpy)
                comm._transport(entry.algorithm).reduce_scatter(mine, flat, raw, lengths, dtype)
                if not in_place:
                    comm._plan(key, entry, mine, flat, raw, lengths, dtype)
            if dtype is not src.dtype:
                copy(dst.flat, mine)
            return dst.result()

        def post(shared: Any) -> Any:
            return shared.post_reduce_scatter(dst.flat, src.flat, raw, lengths, src.dtype)

        return self._issue(async_op, call, carry_out, out, post)

    def broadcast(self, x: Any, root: int = 0, *, algorithm: str = "auto", async_op: bool = False) -> Any:
        """Every rank's `x` becomes the root's. In place; returns `x`, or a Work with `async_op`."""
        if type(root) is not int:  # of an array or a truth value no plan is found
            root = rank_of("broadcast", root, self.size)
        key = None if async_op else self._key(x, None, ("broadcast", root, algorithm))
        if key is not None and self._repeat(key):
            return x
        root = rank_of("broadcast", root, self.size)
        b = Buffer(x, "x", write_only=self.rank != root)
        call = Call("broadcast", (b,), algorithm, root=root)

        def carry_out(comm: Collectives) -> Any:
            if b.device is not None and comm._devices.broadcast(b, root, algorithm):
                return b.result()
            with comm._begin(call) as entry:
                comm._transport(entry.algorithm).broadcast(b.flat, root)
                comm._plan(key, entry, b.flat, root)
            return b.result()

        return self._issue(async_op, call, carry_out, x)

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
        root = rank_of("reduce", root, self.size)
        b = Buffer(x, "x", writable=self.rank == root)
        raw = effective_op(b.dtype, op)
        call = Call("reduce", (b,), algorithm, op=op, root=root, accumulate=accumulate)

        def carry_out(comm: Collectives) -> Any:
            if b.device is not None and comm._devices.reduce(b, root, op, algorithm, accumulate):
                return b.result()
            with comm._begin(call) as entry:
                flat, dtype = _wide(b, entry.algorithm, accumulate)
                comm._transport(entry.algorithm).reduce(flat, raw, root, dtype)
            if dtype is not b.dtype and comm.rank == root:
                copy(b.flat, flat)
            return b.result()

        return self._issue(async_op, call, carry_out, x)

    def gather(self, out: Any, x: Any, root: int = 0, *, algorithm: str = "auto", async_op: bool = False) -> Any:
        """The root's `out` becomes all ranks' `x` in order of rank; the others pass None. Returns `out`, or a Work.

        The root's `x` may be its own place in `out`.
        """
        root = rank_of("gather", root, self.size)
        src, dst = Buffer(x, "x"), Buffer(out, "out", write_only=True) if self.rank == root else None
        if dst is not None:
            lengths, in_place = fit("gather", None, self.rank, self.size, part=("x", src), whole=("out", dst))
        call = Call("gather", (src,) if dst is None else (src, dst), algorithm, root=root)

        def carry_out(comm: Collectives) -> Any:
            if src.device is not None and comm._devices.gather(dst, src, root, algorithm):
                return dst and dst.result()
            with comm._begin(call) as entry:
                if dst is not None and not in_place:
                    dst.flat[slice(*parts(lengths)[root])] = src.flat
                comm._transport(entry.algorithm).gather(dst and dst.flat, src.flat, root)
            return dst and dst.result()

        return self._issue(async_op, call, carry_out, out)

    def scatter(self, out: Any, x: Any, root: int = 0, *, algorithm: str = "auto", async_op: bool = False) -> Any:
        """Every rank's `out` becomes its part of the root's `x`; the others pass None for it. Returns `out`, or a Work.

        The root's `out` may be its own place in `x`.
        """
        root = rank_of("scatter", root, self.size)
        dst, src = Buffer(out, "out", write_only=True), Buffer(x, "x") if self.rank == root else None
        if src is not None:
            lengths, in_place = fit("scatter", None, self.rank, self.size, part=("out", dst), whole=("x", src))
        call = Call("scatter", (dst,) if src is None else (dst, src), algorithm, root=root)

        def carry_out(comm: Collectives) -> Any:
            if dst.device is not None and comm._devices.scatter(dst, src, root, algorithm):
                return dst.result()
            with comm._begin(call) as entry:
                if src is not None and not in_place:
                    dst.flat[...] = src.flat[slice(*parts(lengths)[root])]
                comm._transport(entry.algorithm).scatter(dst.flat, src and src.flat, root)
            return dst.result()

        return self._issue(async_op, call, carry_out, out)

    def all_to_all(self, out: Any, x: Any, *, algorithm: str = "auto", async_op: bool = False) -> Any:
        """Part i of `x` goes to rank i; part i of `out` comes from rank i. Equal parts. Returns `out`, or a Work."""
        src, dst = Buffer(x, "x"), Buffer(out, "out", write_only=True)
        if src.dtype != dst.dtype or src.size != dst.size or src.size % self.size:
            raise ValueError(
                f"all_to_all: x has {src.size} elements of {src.dtype.name}, out {dst.size} of {dst.dtype.name}; "
                f"expected the same dtype and number, divisible by {self.size} ranks"
            )
        if overlap(src, dst):
            raise ValueError("all_to_all: x and out overlap; pass two separate arrays")
        call = Call("all_to_all", (src, dst), algorithm)

        def carry_out(comm: Collectives) -> Any:
            if dst.device is not None and comm._devices.all_to_all(dst, src, algorithm):
                return dst.result()
            with comm._begin(call) as entry:
                comm._transport(entry.algorithm).all_to_all(dst.flat, src.flat)
            return dst.result()

        return self._issue(async_op, call, carry_out, out)


def _wide(b: Buffer, algorithm: str, accumulate: str | None) -> tuple[np.ndarray, DType]:
    """The array to reduce and its dtype: a copy in fp32 where that is to travel. Within a node and by "mpi" it adds in fp32 anyway."""
    if accumulate is None or not b.dtype.is_half or algorithm in ("mpi", *WITHIN_NODE):
        return b.flat, b.dtype
    wide = np.empty(b.flat.size, np.float32)
    copy(wide, b.flat)
    return wide, TABLE["float32"]
