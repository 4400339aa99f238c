"""The collectives of a Communicator: check the arguments, choose the algorithm, call its transport.

Each operation first looks for a plan of an earlier, equal call. Without a plan it makes `Buffer` views of the arrays and checks that
they fit. `carry_out` then calls the transport of the chosen algorithm and `result()`. calls.py documents the operations.

A new collective needs: its method in calls.py and here, a Transport's method (transports/transport.py) in mpi.py, scheduled.py,
node/pulls.py and gpu/nccl.py, its name in selection/selector.py, its schedules in schedules/__init__.py, their expected result in
schedules/check.py.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.arrays import devices
from collectives.arrays.buffer import Buffer
from collectives.arrays.dtypes import TABLE, DType, effective_op
from collectives.arrays.of_caller import ReductionOfCaller
from collectives.arrays.reduction import copy
from collectives.communicator.arguments import (
    bounds_of_parts,
    bounds_of_runs,
    counts_of_exchange,
    fit,
    overlap,
    rank_of,
)
from collectives.communicator.dispatch import DONE, Dispatch
from collectives.progress.work import Ended, Work
from collectives.selection.selector import WITHIN_NODE
from collectives.transports.call import Call
from collectives.transports.node.posted import Post
from collectives.transports.node.shared import Shared
from collectives.transports.runs import NodeExchange, Runs
from collectives.transports.transport import Counts, parts


class Collectives:
    """The collectives, carried out by `dispatch`. The arguments are those of the Communicator's methods."""

    def __init__(self, dispatch: Dispatch) -> None:
        self.rank, self.size = dispatch.rank, dispatch.size
        self._repeat, self._issue, self._refuse_group = dispatch.repeat, dispatch.issue, dispatch.refuse_group
        self._grid = dispatch.transports.grid  # the ranks on each node

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

    def reduce_by(
        self, x: Any, reduce: Callable[[list[Any]], object], bounds: Sequence[tuple[int, int]], runs: Runs | None
    ) -> Work:
        self._refuse_group("reduce_by")
        src = Buffer(x, "x")
        bounds = bounds_of_parts("reduce_by", bounds, self.size, x=src)
        runs = runs or Runs.alone(self.size, src.dtype.numpy)
        of_runs = bounds_of_runs("reduce_by", runs.bounds, self._grid)
        by_caller = ReductionOfCaller(x, src, reduce, runs.combine, of_runs, runs.dtype)
        mine, lengths = slice(*bounds[self.rank]), [end - begin for begin, end in bounds]
        whole = src.flat if by_caller.on_device is None else by_caller.on_device
        if self.size == 1 or not any(lengths):
            by_caller.reduce_ranks([whole[mine]] * self.size)
            return Ended(x)

        counts = Counts(lengths, [lengths[self.rank]] * self.size)
        if src.device is not None:
            sent, received = (devices.empty_beside(whole, sum(each), src.dtype) for each in counts)
            for (begin, end), part in zip(parts(counts.send), bounds, strict=True):
                sent[begin:end] = whole[slice(*part)]
            self.all_to_all(received, sent, counts.send, counts.recv, "auto", False)
            by_caller.reduce_ranks([received[slice(*part)] for part in parts(counts.recv)])
            return Ended(x)

        flat = src.flat[: max(end for _, end in bounds)]  # the same length on all ranks
        said = [number for pair in (*bounds, *of_runs) for number in pair]
        call = Call("all_to_all", (src,), "auto", counts=said, sizes_differ=True)

        def carry_out(dispatch: Dispatch) -> Any:
            shared, of_node = dispatch.transports.shared, dispatch.transports.on_node
            with dispatch.begin(call) as entry:
                if shared is not None:
                    shared.use_parts(flat, [bounds[self.rank]], lambda found: by_caller.reduce_ranks(found[0]))
                    return x
                across = dispatch.transports.of(entry.algorithm)
                if of_node is not None:
                    exchange = NodeExchange(
                        self.rank, self._grid, bounds, of_runs, flat.dtype, by_caller.combined.numpy
                    )
                    by_caller.reduce(exchange.carry_out(flat, by_caller.combine, of_node, across))
                    return x
                received = np.empty(sum(counts.recv), flat.dtype)
                across.all_to_all(received, np.concatenate([flat[slice(*part)] for part in bounds]), counts)
                by_caller.reduce_ranks([received[slice(*part)] for part in parts(counts.recv)])
            return x

        def post(shared: Shared) -> Post:
            return shared.post_parts(flat, bounds[self.rank], by_caller.reduce_ranks)

        work: Work = self._issue(True, call, carry_out, x, post)
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
