"""The Communicator: a group of ranks and the operations between them, on torch and NumPy arrays.

Collectives are called in the same order on every rank of a communicator. An array is checked on its own rank before anything is
sent: TypeError for what is no array or a dtype outside the table, ValueError for non-contiguous or read-only arrays and for sizes
that do not fit each other. What differs between ranks is found in checked mode (`checked=True` or MPITRAIN_DEBUG=1).
"""

import functools
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import numpy as np

from collectives import diagnosis
from collectives.arrays import Buffer, like
from collectives.dtypes import DType, dtype_of, effective_op
from collectives.reduction import divide
from collectives.schedules import BUILDERS, Schedule
from collectives.selection import choose
from collectives.work import Work


@functools.cache
def world() -> "Communicator":
    """The one Communicator of all ranks, on a private clone of COMM_WORLD. Starts MPI at the first call, which is collective.

    From then on an uncaught exception on one rank ends the job instead of leaving the others to wait for ever.
    """
    from mpi4py import MPI

    clone = MPI.COMM_WORLD.Dup()
    if clone.size > 1:
        diagnosis.abort_on_uncaught(clone)
    return Communicator(clone)


class Communicator:
    """A group of ranks. Made by `world()`, `split` or a `Mesh`, never directly.

    `rank`, `size`; `node`: the Communicator of the ranks that share memory with this one; `num_nodes`; `mpi`: mpi4py's handle.
    """

    def __init__(self, mpi: Any, *, checked: bool | None = None, _node: "Communicator | None" = None) -> None:
        from mpi4py import MPI

        from collectives.transports import mpi as transport
        from collectives.transports.shared import NodeMemory

        self.mpi = mpi
        self.rank: int = mpi.rank
        self.size: int = mpi.size
        self.checked = os.environ.get("MPITRAIN_DEBUG", "0") not in ("", "0") if checked is None else checked
        self._transport: Any = transport  # a module that starts MPI when it is imported: only now
        self._schedules: dict[tuple[str, str, int], Schedule] = {}
        if _node is None:
            _node = Communicator(mpi.Split_type(MPI.COMM_TYPE_SHARED), checked=self.checked, _node=self)
            self.num_nodes: int = mpi.allreduce(1 if _node.rank == 0 else 0)
            self.node: Communicator = _node
            self._memory: NodeMemory = _node._memory if self.num_nodes == 1 else NodeMemory(MPI.COMM_SELF)
        else:
            self.num_nodes = 1
            self.node = self
            self._memory = NodeMemory(mpi)

    def __repr__(self) -> str:
        return f"Communicator(rank={self.rank}, size={self.size}, num_nodes={self.num_nodes})"

    # Groups

    def split(self, color: int, key: int = 0) -> "Communicator":
        """The ranks that pass the same `color`, ordered by (`key`, rank here). Collective."""
        return Communicator(self.mpi.Split(color, key), checked=self.checked)

    def free(self) -> None:
        """Give back the MPI communicators of this one and its `node`. Collective; never done by the garbage collector."""
        if self.node is not self:
            self.node.free()
        self.mpi.Free()

    # Memory of the node

    def empty(self, shape: int | Sequence[int], dtype: object) -> Any:
        """An array of this rank's own that its peers on the node can read: reductions on it move each element once. Collective.

        A torch tensor for a torch dtype, else a NumPy array; zeros. All ranks pass the same shape and dtype. On a communicator of
        several nodes it is ordinary memory. OSError on all ranks if the node's shared memory is full.
        """
        return self._allocate(self._memory.empty, shape, dtype)

    def shared(self, shape: int | Sequence[int], dtype: object) -> Any:
        """One array, the same memory on every rank: `comm.node.shared(...)`. Collective. Zeros.

        A torch tensor for a torch dtype, else a NumPy array. Who writes what when is the caller's to order, by `barrier()`.
        ValueError on a communicator of several nodes; OSError on all ranks if the node's shared memory is full.
        """
        if self.num_nodes > 1:
            raise ValueError(
                f"shared: these {self.size} ranks are on {self.num_nodes} nodes; call comm.node.shared(...)"
            )
        return self._allocate(self._memory.shared, shape, dtype)

    def _allocate(self, allocate: Callable[[int], np.ndarray], shape: int | Sequence[int], dtype: object) -> Any:
        row = dtype_of(dtype)
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        count = int(np.prod(shape, dtype=np.int64))
        if self.checked:
            diagnosis.compare_calls(self.mpi, f"{allocate.__name__}({shape}, {row.name})")
        return like(allocate(count * row.itemsize).view(row.numpy), dtype).reshape(shape)

    # Collectives

    def all_reduce(self, x: Any, op: str = "sum", *, algorithm: str = "auto", async_op: bool = False) -> Any:
        """Every rank's `x` becomes the reduction of all ranks' `x`. In place; returns `x`, or a Work with `async_op`.

        `op`: sum, avg, prod, max, min. The same bits on all ranks. fp16 and bf16 are added in fp32: rounded once within a node's
        memory and by "mpi", at every hop by "ring" and "tree".
        """
        b = Buffer(x, "x", writable=True)
        raw = effective_op(b.dtype, op)
        algorithm = self._begin("all_reduce", b, algorithm, op=op, shared=self._memory.is_readable(b.flat))
        if algorithm == "mpi":
            request, finish = self._transport.all_reduce(self.mpi, b.flat, raw, b.dtype, async_op)
            return self._end(x, async_op, request, finish, b)
        if algorithm == "shared":
            self._memory.all_reduce(b.flat, raw, b.dtype)
        else:
            schedule = self._schedule("all_reduce", algorithm)
            self._execute(schedule, _cut(b.flat, schedule.num_chunks), raw, b.dtype)
            if op == "avg":
                divide(b.flat, self.size, b.dtype)
        return self._end(x, async_op, None, None, b)

    def all_gather(
        self, out: Any, x: Any, *, counts: Sequence[int] | None = None, algorithm: str = "auto", async_op: bool = False
    ) -> Any:
        """`out` becomes all ranks' `x`, one after the other in order of rank. Returns `out`, or a Work with `async_op`.

        `counts`: elements of each rank where they differ. `x` may be its own place in `out`. Where `out` is this communicator's
        `shared` array, a rank writes its part once and that is all.
        """
        src, dst = Buffer(x, "x"), Buffer(out, "out", writable=True)
        counts = self._counts("all_gather", counts, part=("x", src), whole=("out", dst))
        algorithm = self._begin("all_gather", dst, algorithm, counts=counts, shared=self._memory.is_shared(dst.flat))
        if algorithm == "mpi":
            start = sum(counts[: self.rank])
            place = dst.flat[start : start + src.flat.size]
            # MPI forbids overlapping buffers; where x stands in its place already, hand over a copy of it.
            flat = src.flat.copy() if place.size and place.ctypes.data == src.flat.ctypes.data else src.flat
            request, _ = self._transport.all_gather(self.mpi, dst.flat, flat, counts, async_op)
            return self._end(out, async_op, request, None, dst, keep=flat)
        if algorithm == "shared":
            self._memory.all_gather(dst.flat, src.flat, counts)
        else:
            chunks = _cut(dst.flat, counts=counts)
            chunks[self.rank][...] = src.flat
            self._execute(self._schedule("all_gather", algorithm), chunks, "sum", dst.dtype)
        return self._end(out, async_op, None, None, dst)

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

        `counts`: elements of each rank's part where they differ. `x` is left as it is, and may be written again after the call.
        """
        src, dst = Buffer(x, "x"), Buffer(out, "out", writable=True)
        raw = effective_op(src.dtype, op)
        counts = self._counts("reduce_scatter", counts, part=("out", dst), whole=("x", src))
        algorithm = self._begin(
            "reduce_scatter", src, algorithm, op=op, counts=counts, shared=self._memory.is_readable(src.flat)
        )
        if algorithm == "mpi":
            request, finish = self._transport.reduce_scatter(
                self.mpi, dst.flat, src.flat, raw, counts, src.dtype, async_op
            )
            return self._end(out, async_op, request, finish, dst, keep=src)
        if algorithm == "shared":
            self._memory.reduce_scatter(dst.flat, src.flat, raw, counts, src.dtype)
        else:
            chunks = _cut(src.flat.copy(), counts=counts)
            self._execute(self._schedule("reduce_scatter", algorithm), chunks, raw, src.dtype)
            dst.flat[...] = chunks[self.rank]
            if op == "avg":
                divide(dst.flat, self.size, dst.dtype)
        return self._end(out, async_op, None, None, dst)

    def broadcast(self, x: Any, root: int = 0, *, algorithm: str = "auto", async_op: bool = False) -> Any:
        """Every rank's `x` becomes the root's. In place; returns `x`, or a Work with `async_op`."""
        b = Buffer(x, "x", writable=True)
        algorithm = self._begin("broadcast", b, algorithm, root=root)
        if algorithm == "mpi":
            request, _ = self._transport.broadcast(self.mpi, b.flat, root, async_op)
            return self._end(x, async_op, request, None, b)
        self._execute(self._schedule("broadcast", algorithm, root), [b.flat], "sum", b.dtype)
        return self._end(x, async_op, None, None, b)

    def reduce(self, x: Any, root: int = 0, op: str = "sum", *, algorithm: str = "auto", async_op: bool = False) -> Any:
        """The root's `x` becomes the reduction of all ranks' `x`; the others' stay as they are. Returns `x`, or a Work."""
        b = Buffer(x, "x", writable=self.rank == root)
        raw = effective_op(b.dtype, op)
        algorithm = self._begin("reduce", b, algorithm, op=op, root=root)
        if algorithm == "mpi":
            request, finish = self._transport.reduce(self.mpi, b.flat, raw, root, b.dtype, async_op)
            return self._end(x, async_op, request, finish, b)
        # Inner ranks of the tree keep partial sums: not in the caller's array.
        flat = b.flat if self.rank == root else b.flat.copy()
        self._execute(self._schedule("reduce", algorithm, root), [flat], raw, b.dtype)
        if op == "avg" and self.rank == root:
            divide(b.flat, self.size, b.dtype)
        return self._end(x, async_op, None, None, b)

    def gather(self, out: Any, x: Any, root: int = 0, *, algorithm: str = "auto", async_op: bool = False) -> Any:
        """The root's `out` becomes all ranks' `x` in order of rank; the others pass None. Returns `out`, or a Work."""
        src = Buffer(x, "x")
        dst = Buffer(out, "out", writable=True) if self.rank == root else None
        if dst is not None:
            self._counts("gather", None, part=("x", src), whole=("out", dst))
        self._begin("gather", src, algorithm, root=root)
        request, _ = self._transport.gather(self.mpi, None if dst is None else dst.flat, src.flat, root, async_op)
        return self._end(out, async_op, request, None, dst, keep=src)

    def scatter(self, out: Any, x: Any, root: int = 0, *, algorithm: str = "auto", async_op: bool = False) -> Any:
        """Every rank's `out` becomes its part of the root's `x`; the others pass None for it. Returns `out`, or a Work."""
        dst = Buffer(out, "out", writable=True)
        src = Buffer(x, "x") if self.rank == root else None
        if src is not None:
            self._counts("scatter", None, part=("out", dst), whole=("x", src))
        self._begin("scatter", dst, algorithm, root=root)
        request, _ = self._transport.scatter(self.mpi, dst.flat, None if src is None else src.flat, root, async_op)
        return self._end(out, async_op, request, None, dst, keep=src)

    def all_to_all(self, out: Any, x: Any, *, algorithm: str = "auto", async_op: bool = False) -> Any:
        """Part i of `x` goes to rank i; part i of `out` comes from rank i. Equal parts. Returns `out`, or a Work."""
        src, dst = Buffer(x, "x"), Buffer(out, "out", writable=True)
        if src.dtype != dst.dtype or src.flat.size != dst.flat.size or src.flat.size % self.size:
            raise ValueError(
                f"all_to_all: x has {src.flat.size} elements of {src.dtype.name}, out {dst.flat.size} of {dst.dtype.name}; "
                f"expected the same dtype and number, divisible by {self.size} ranks"
            )
        self._begin("all_to_all", src, algorithm)
        request, _ = self._transport.all_to_all(self.mpi, dst.flat, src.flat, async_op)
        return self._end(out, async_op, request, None, dst, keep=src)

    # Point to point

    def send(self, x: Any, peer: int, tag: int = 0) -> None:
        """Send `x` to rank `peer`. Returns when `x` may be written again."""
        self._check_peer("send", peer)
        self.mpi.Send(self._transport.message(Buffer(x, "x").flat), peer, _USER_TAG + tag)

    def recv(self, x: Any, peer: int, tag: int = 0) -> Any:
        """Receive into `x` what rank `peer` sends with `tag`; returns `x`. ValueError if the message has another size."""
        self._check_peer("recv", peer)
        b = Buffer(x, "x", writable=True)
        status = self._transport.MPI.Status()
        self.mpi.Probe(peer, _USER_TAG + tag, status)
        nbytes = status.Get_count(self._transport.MPI.BYTE)
        if nbytes != b.flat.nbytes:
            self.mpi.Recv(
                bytearray(nbytes), peer, _USER_TAG + tag
            )  # take it off the line, so that the next one is not mistaken
            raise ValueError(f"recv: rank {peer} sent {nbytes} bytes, but x has {b.flat.nbytes}")
        self.mpi.Recv(self._transport.message(b.flat), peer, _USER_TAG + tag)
        b.flush()
        return x

    # Control

    def barrier(self) -> None:
        """Return when every rank has called it."""
        if self.checked:
            diagnosis.compare_calls(self.mpi, "barrier")
        self.mpi.Barrier()

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """The root's `obj`, on every rank. Pickled: for small control messages, never for data."""
        return self.mpi.bcast(obj, root)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Every rank's `obj` in order of rank. Pickled: for small control messages, never for data."""
        return self.mpi.allgather(obj)

    def together(self, doing: str = "") -> AbstractContextManager[None]:
        """`with comm.together("reading the data"):` - an error in the block on any rank is raised on every rank.

        The same type and text on all, naming the ranks that failed, and `collectives.on_all_ranks(error)` is true of it.
        The block must hold no collective.
        """
        return diagnosis.together(self.mpi, doing)

    # Parts of the operations above

    def _begin(
        self,
        operation: str,
        b: Buffer,
        algorithm: str,
        *,
        op: str = "",
        root: int | None = None,
        counts: Sequence[int] = (),
        shared: bool = False,
    ) -> str:
        """Check what all ranks must agree on, and choose the algorithm."""
        if root is not None and not 0 <= root < self.size:
            raise ValueError(f"{operation}: root {root} is outside the {self.size} ranks of this communicator")
        if self.checked:
            what = ", ".join(
                f"{k}={v}"
                for k, v in {"op": op, "root": root, "counts": tuple(counts)}.items()
                if v not in ("", None, ())
            )
            place = "node memory" if shared else "private memory"
            diagnosis.compare_calls(
                self.mpi, f"{operation}({b.flat.size} x {b.dtype.name}, {what or 'no options'}, {algorithm}, {place})"
            )
        return choose(operation, algorithm, dtype=b.dtype, nbytes=b.flat.nbytes, in_node_memory=shared)

    def _end(
        self,
        result: Any,
        async_op: bool,
        request: Any,
        finish: Callable[[], None] | None,
        written: Buffer | None,
        keep: Any = None,
    ) -> Any:
        """The operation's Work, waited for unless the caller does. `keep`: what MPI reads until then."""

        def complete(_keep: Any = keep) -> None:
            if finish is not None:
                finish()
            if written is not None:
                written.flush()

        work = Work(result, request, complete)
        return work if async_op else work.wait()

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

    def _check_peer(self, operation: str, peer: int) -> None:
        if not 0 <= peer < self.size or peer == self.rank:
            raise ValueError(f"{operation}: peer {peer} is not another one of the {self.size} ranks")

    def _schedule(self, operation: str, algorithm: str, root: int = 0) -> Schedule:
        key = (operation, algorithm, root)
        if key not in self._schedules:
            self._schedules[key] = BUILDERS[operation][algorithm](self.size, root)
        return self._schedules[key]

    def _execute(self, schedule: Schedule, chunks: Sequence[np.ndarray], op: str, dtype: DType) -> None:
        self._transport.execute(schedule, self.mpi, chunks, op, dtype)


_USER_TAG = 1 << 8  # tags below are the library's own


def _cut(flat: np.ndarray, num_chunks: int = 1, *, counts: Sequence[int] | None = None) -> list[np.ndarray]:
    """`flat` in consecutive pieces: of `counts` elements, or `num_chunks` as equal as can be."""
    if counts is None:
        bounds = [flat.size * i // num_chunks for i in range(num_chunks + 1)]
    else:
        bounds = [0, *np.cumsum(counts).tolist()]
    return [flat[begin:end] for begin, end in pairwise(bounds)]
