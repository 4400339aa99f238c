"""The collectives of a Communicator: check the arguments, choose the algorithm, call its transport.

Each operation first looks for a plan of an earlier, equal call. Without a plan it makes `Buffer` views of the arrays and checks that
they fit. `carry_out` then calls the transport of the chosen algorithm and `result()`. communicator.py documents the operations.

A new collective needs: its method there and here, a Transport's method (transports/transport.py) in mpi.py, scheduled.py, node/pulls.py
and gpu/nccl.py, its name in selection/selector.py, its schedules in schedules/__init__.py, their expected result in schedules/check.py.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.arrays.buffer import Buffer, like
from collectives.arrays.dtypes import TABLE, DType, effective_op
from collectives.arrays.reduction import copy
from collectives.communicator.arguments import bounds_of_parts, counts_of_exchange, fit, overlap, rank_of
from collectives.communicator.call import Call
from collectives.communicator.dispatch import DONE, Dispatch
from collectives.progress.work import Ended, Work
from collectives.selection.selector import WITHIN_NODE
from collectives.transports.node.posted import Post
from collectives.transports.node.shared import Shared
from collectives.transports.transport import Counts, parts


class Collectives:
    """The collectives, carried out by `dispatch`. The arguments are those of the Communicator's methods."""

    def __init__(self, dispatch: Dispatch) -> None:
        self.rank, self.size = dispatch.rank, dispatch.size
        self._repeat, self._issue = dispatch.repeat, dispatch.issue

    def all_reduce(
        self,
        x: Any,
        op: str,
        algorithm: str,
        accumulate: str | None = None,
        async_op: bool = False,
    ) -> Any:
        key = None if async_op else self._repeat(x, None, ("all_reduce", op, algorithm, accumulate))
        if key is DONE:
            return x
        b = Buffer(x, "x", writable=True)
        raw = effective_op(b.dtype, op)
        call = Call("all_reduce", (b,), algorithm, op=op, accumulate=accumulate)

        def carry_out(dispatch: Dispatch) -> Any:
            if b.device is not None and dispatch.devices.carry_out(call, (b,), raw):
                return b.result()
            with dispatch.begin(call) as entry:
                flat, dtype = _wide(b, entry.algorithm, accumulate)
                dispatch.transports.of(entry.algorithm).all_reduce(flat, raw, dtype)
                dispatch.keep_plan(key, call, entry, flat, raw, dtype)
            if dtype is not b.dtype:
                copy(b.flat, flat)
            return b.result()

        return self._issue(async_op, call, carry_out, x)

    def all_gather(self, out: Any, x: Any, counts: Sequence[int] | None, algorithm: str, async_op: bool) -> Any:
        key = None if async_op or counts is not None else self._repeat(x, out, ("all_gather", algorithm))
        if key is DONE:
            return out
        src, dst = Buffer(x, "x"), Buffer(out, "out", write_only=True)
        lengths, in_place = fit("all_gather", counts, self.rank, self.size, part=("x", src), whole=("out", dst))
        call = Call("all_gather", (dst, src), algorithm, counts=lengths)

        def carry_out(dispatch: Dispatch) -> Any:
            if dst.device is not None and dispatch.devices.carry_out(call, (dst, src), lengths):
                return dst.result()
            with dispatch.begin(call) as entry:
                dispatch.transports.of(entry.algorithm).all_gather(dst.flat, src.flat, lengths)
                if not in_place:
                    dispatch.keep_plan(key, call, entry, dst.flat, src.flat, lengths)
            return dst.result()

        return self._issue(async_op, call, carry_out, out)

    def reduce_scatter(
        self,
        out: Any,
        x: Any,
        op: str,
        counts: Sequence[int] | None,
        algorithm: str,
        accumulate: str | None,
        async_op: bool,
    ) -> Any:
        key = None
        if not async_op and counts is None:
            key = self._repeat(x, out, ("reduce_scatter", op, algorithm, accumulate))
        if key is DONE:
            return out
        src, dst = Buffer(x, "x"), Buffer(out, "out", write_only=True)
        raw = effective_op(src.dtype, op)
        lengths, in_place = fit("reduce_scatter", counts, self.rank, self.size, part=("out", dst), whole=("x", src))
        call = Call("reduce_scatter", (src, dst), algorithm, op=op, counts=lengths, accumulate=accumulate)

        def carry_out(dispatch: Dispatch) -> Any:
            if dst.device is not None and dispatch.devices.carry_out(call, (dst, src), raw, lengths):
                return dst.result()
            with dispatch.begin(call) as entry:
                flat, dtype = _wide(src, entry.algorithm, accumulate)
                mine = dst.flat if dtype is src.dtype else np.empty(dst.flat.size, dtype.numpy)
                dispatch.transports.of(entry.algorithm).reduce_scatter(mine, flat, raw, lengths, dtype)
                if not in_place:
                    dispatch.keep_plan(key, call, entry, mine, flat, raw, lengths, dtype)
            if dtype is not src.dtype:
                copy(dst.flat, mine)
            return dst.result()

        def post(shared: Shared) -> Post:
            return shared.post_reduce_scatter(dst.flat, src.flat, raw, lengths, src.dtype)

        return self._issue(async_op, call, carry_out, out, post)

    def broadcast(self, x: Any, root: int, algorithm: str, async_op: bool = False) -> Any:
        if type(root) is not int:  # plans are found by plain ints; a bool must raise although it equals 0 or 1
            root = rank_of("broadcast", root, self.size)
        key = None if async_op else self._repeat(x, None, ("broadcast", root, algorithm))
        if key is DONE:
            return x
        root = rank_of("broadcast", root, self.size)
        b = Buffer(x, "x", write_only=self.rank != root)
        call = Call("broadcast", (b,), algorithm, root=root)

        def carry_out(dispatch: Dispatch) -> Any:
            if b.device is not None and dispatch.devices.carry_out(call, (b,), root):
                return b.result()
            with dispatch.begin(call) as entry:
                dispatch.transports.of(entry.algorithm).broadcast(b.flat, root)
                dispatch.keep_plan(key, call, entry, b.flat, root)
            return b.result()

        return self._issue(async_op, call, carry_out, x)

    def reduce(
        self,
        x: Any,
        root: int,
        op: str,
        algorithm: str,
        accumulate: str | None = None,
        async_op: bool = False,
    ) -> Any:
        root = rank_of("reduce", root, self.size)
        b = Buffer(x, "x", writable=self.rank == root)
        raw = effective_op(b.dtype, op)
        call = Call("reduce", (b,), algorithm, op=op, root=root, accumulate=accumulate)

        def carry_out(dispatch: Dispatch) -> Any:
            if b.device is not None and dispatch.devices.carry_out(call, (b,), raw, root):
                return b.result()
            with dispatch.begin(call) as entry:
                flat, dtype = _wide(b, entry.algorithm, accumulate)
                dispatch.transports.of(entry.algorithm).reduce(flat, raw, root, dtype)
            if dtype is not b.dtype and dispatch.rank == root:
                copy(b.flat, flat)
            return b.result()

        return self._issue(async_op, call, carry_out, x)

    def gather(self, out: Any, x: Any, root: int, algorithm: str, async_op: bool) -> Any:
        root = rank_of("gather", root, self.size)
        src, dst = Buffer(x, "x"), Buffer(out, "out", write_only=True) if self.rank == root else None
        if dst is not None:
            lengths, in_place = fit("gather", None, self.rank, self.size, part=("x", src), whole=("out", dst))
        call = Call("gather", (src,) if dst is None else (src, dst), algorithm, root=root)

        def carry_out(dispatch: Dispatch) -> Any:
            if src.device is not None and dispatch.devices.carry_out(call, (dst, src), root):
                return dst and dst.result()
            with dispatch.begin(call) as entry:
                if dst is not None and not in_place:
                    dst.flat[slice(*parts(lengths)[root])] = src.flat
                dispatch.transports.of(entry.algorithm).gather(None if dst is None else dst.flat, src.flat, root)
            return dst and dst.result()

        return self._issue(async_op, call, carry_out, out)

    def scatter(self, out: Any, x: Any, root: int, algorithm: str, async_op: bool) -> Any:
        root = rank_of("scatter", root, self.size)
        dst, src = Buffer(out, "out", write_only=True), Buffer(x, "x") if self.rank == root else None
        if src is not None:
            lengths, in_place = fit("scatter", None, self.rank, self.size, part=("out", dst), whole=("x", src))
        call = Call("scatter", (dst,) if src is None else (dst, src), algorithm, root=root)

        def carry_out(dispatch: Dispatch) -> Any:
            if dst.device is not None and dispatch.devices.carry_out(call, (dst, src), root):
                return dst.result()
            with dispatch.begin(call) as entry:
                if src is not None and not in_place:
                    dst.flat[...] = src.flat[slice(*parts(lengths)[root])]
                dispatch.transports.of(entry.algorithm).scatter(dst.flat, None if src is None else src.flat, root)
            return dst.result()

        return self._issue(async_op, call, carry_out, out)

    def all_to_all(
        self,
        out: Any,
        x: Any,
        send_counts: Sequence[int] | None,
        recv_counts: Sequence[int] | None,
        algorithm: str,
        async_op: bool,
    ) -> Any:
        src, dst = Buffer(x, "x"), Buffer(out, "out", write_only=True)
        counts = counts_of_exchange(send_counts, recv_counts, self.size, x=src, out=dst)
        if overlap(src, dst):
            raise ValueError("all_to_all: x and out overlap; pass two separate arrays")
        call = Call("all_to_all", (src, dst), algorithm, sizes_differ=counts is not None)

        def carry_out(dispatch: Dispatch) -> Any:
            if dst.device is not None and dispatch.devices.carry_out(call, (dst, src), counts):
                return dst.result()
            with dispatch.begin(call) as entry:
                dispatch.transports.of(entry.algorithm).all_to_all(dst.flat, src.flat, counts)
            return dst.result()

        return self._issue(async_op, call, carry_out, out)

    def reduce_by(self, x: Any, reduce: Callable[[list[Any]], object], bounds: Sequence[tuple[int, int]]) -> Work:
        src = Buffer(x, "x")
        bounds = bounds_of_parts("reduce_by", bounds, self.size, x=src)
        kind = getattr(x, "dtype", None)
        if self.size == 1:
            (begin, end), whole = bounds[0], x.reshape(-1)
            reduce([whole[begin:end]])
            return Ended(None)

        lengths = [end - begin for begin, end in bounds]
        counts = Counts(lengths, [lengths[self.rank]] * self.size)
        if src.device is not None:
            flat = x.reshape(-1)
            sent, received = flat.new_empty(sum(lengths)), flat.new_empty(sum(counts.recv))
            for (begin, end), part in zip(bounds, sent.split(lengths), strict=True):
                part.copy_(flat[begin:end])
            self.all_to_all(received, sent, counts.send, counts.recv, "auto", False)
            reduce(received.split(counts.recv))
            return Ended(None)
        call = Call("all_to_all", (src,), "auto", sizes_differ=True)

        def use(of_ranks: Sequence[np.ndarray]) -> None:
            reduce([like(part, kind) for part in of_ranks])

        def carry_out(dispatch: Dispatch) -> None:
            with dispatch.begin(call) as entry:
                shared = dispatch.transports.shared
                if shared is None or not shared.use_parts(src.flat, bounds[self.rank], use):
                    sent = np.concatenate([src.flat[slice(*part)] for part in bounds])
                    received = np.empty(sum(counts.recv), sent.dtype)
                    dispatch.transports.of(entry.algorithm).all_to_all(received, sent, counts)
                    use([received[slice(*part)] for part in parts(counts.recv)])

        def post(shared: Shared) -> Post:
            return shared.post_parts(src.flat, bounds[self.rank], use)

        work: Work = self._issue(True, call, carry_out, None, post)
        return work


def _wide(b: Buffer, algorithm: str, accumulate: str | None) -> tuple[np.ndarray, DType]:
    """The array to reduce and its dtype: with `accumulate`, and for "encoded", an fp32 copy of fp16 or bf16.

    The algorithms that add in fp32 anyway get no copy.
    """
    wants_fp32 = algorithm == "encoded" or (accumulate is not None and algorithm not in ("mpi", *WITHIN_NODE))
    if not b.dtype.is_half or not wants_fp32:
        return b.flat, b.dtype
    wide = np.empty(b.flat.size, np.float32)
    copy(wide, b.flat)
    return wide, TABLE["float32"]
