"""Collectives on arrays in GPU memory, by whichever way there is: NCCL, else CUDA-aware MPI; and what goes by neither.

Each operation says whether it was carried out here. Where not, the caller goes on with a copy in host memory (collectives/devices.py).
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.arrays import Buffer
from collectives.devices import say_once
from collectives.diagnosis.record import Entry
from collectives.dtypes import effective_op
from collectives.transports import cuda
from collectives.transports.binding import NcclUnavailableError
from collectives.transports.mpi import Library, message
from collectives.transports.nccl import Nccl, connect, reduces
from collectives.transports.nccl_queue import Handle
from collectives.work import Work


class Devices:
    """The ways of the ranks of `mpi` to each other's GPUs. They are looked for at the first operation, which is collective."""

    def __init__(self, mpi: Any, enter: Callable[..., Entry]) -> None:
        """`enter`: notes a collective in the flight record, and compares it in checked mode."""
        self._mpi, self._enter = mpi, enter
        self._nccl: Nccl | None = None
        self._why_not = ""
        self._cuda_aware = False
        self._index: int | None = None
        self._handles: list[Handle] | None = None

    def all_reduce(self, x: Buffer, op: str, algorithm: str) -> bool:
        return self._carry_out(
            "all_reduce",
            [x],
            op,
            algorithm,
            lambda nccl, x_, **more: nccl.all_reduce(x_, op, x.dtype, **more),
            lambda view: Library(self._mpi).all_reduce(view, effective_op(x.dtype, op), x.dtype),
        )

    def reduce(self, x: Buffer, root: int, op: str, algorithm: str) -> bool:
        return self._carry_out(
            "reduce",
            [x],
            op,
            algorithm,
            lambda nccl, x_, **more: nccl.reduce(x_, root, op, x.dtype, **more),
            lambda view: Library(self._mpi).reduce(view, effective_op(x.dtype, op), root, x.dtype),
        )

    def reduce_scatter(
        self, out: Buffer, x: Buffer, op: str, counts: Sequence[int], in_place: bool, algorithm: str
    ) -> bool:
        def by_mpi(target: np.ndarray, source: np.ndarray) -> None:
            Library(self._mpi).reduce_scatter(target, source, effective_op(x.dtype, op), counts, x.dtype)

        return self._carry_out(
            "reduce_scatter",
            [out, x],
            op,
            algorithm,
            lambda nccl, out_, x_, **more: nccl.reduce_scatter(out_, x_, op, x.dtype, counts=counts, **more),
            None if in_place else by_mpi,
        )

    def all_gather(self, out: Buffer, x: Buffer, counts: Sequence[int], in_place: bool, algorithm: str) -> bool:
        def by_mpi(target: np.ndarray, source: np.ndarray) -> None:
            self._mpi.Allgatherv(message(source), message(target, list(counts)))

        return self._carry_out(
            "all_gather",
            [out, x],
            None,
            algorithm,
            lambda nccl, out_, x_, **more: nccl.all_gather(out_, x_, x.dtype, counts=counts, **more),
            None if in_place else by_mpi,
        )

    def broadcast(self, x: Buffer, root: int, algorithm: str) -> bool:
        return self._carry_out(
            "broadcast",
            [x],
            None,
            algorithm,
            lambda nccl, x_, **more: nccl.broadcast(x_, root, x.dtype, **more),
            lambda view: Library(self._mpi).broadcast(view, root),
        )

    def gather(self, out: Buffer | None, x: Buffer, root: int, algorithm: str) -> bool:
        return self._carry_out(
            "gather",
            [x] if out is None else [x, out],
            None,
            algorithm,
            lambda nccl, x_, out_=None, **more: nccl.gather(out_, x_, root, x.dtype, **more),
        )

    def scatter(self, out: Buffer, x: Buffer | None, root: int, algorithm: str) -> bool:
        return self._carry_out(
            "scatter",
            [out] if x is None else [out, x],
            None,
            algorithm,
            lambda nccl, out_, x_=None, **more: nccl.scatter(out_, x_, root, out.dtype, **more),
        )

    def all_to_all(self, out: Buffer, x: Buffer, algorithm: str) -> bool:
        return self._carry_out(
            "all_to_all",
            [out, x],
            None,
            algorithm,
            lambda nccl, out_, x_, **more: nccl.all_to_all(out_, x_, x.dtype, **more),
            lambda target, source: Library(self._mpi).all_to_all(target, source),
        )

    def issue(self, operation: Callable[[], Any]) -> Work:
        """Start `operation`, a collective on arrays in GPU memory, at once: NCCL's stream is what makes it asynchronous."""
        self._handles = []
        try:
            result = operation()
            return OnStream(result, self._handles)
        finally:
            self._handles = None

    def free(self) -> None:
        """Collective."""
        if self._nccl is not None:
            self._nccl.free()

    def _carry_out(
        self,
        operation: str,
        buffers: Sequence[Buffer],
        op: str | None,
        algorithm: str,
        by_nccl: Callable[..., Handle | None],
        by_mpi: Callable[..., None] | None = None,
    ) -> bool:
        """`by_nccl(nccl, *devices, async_op=...)` if NCCL can, else `by_mpi(*views)` if MPI can read them. `op`: of a reduction."""
        devices = [b.device for b in buffers if b.device is not None]
        if len(devices) < len(buffers) or algorithm not in ("auto", "nccl", "mpi"):
            return False  # mixed with host arrays, or an algorithm of host arrays
        index = devices[0].index
        if index is None:
            return False  # an array that does not tell on which GPU it lies
        if self._index is None:
            self._connect(index)
        dtype = buffers[0].dtype
        if algorithm != "mpi" and self._nccl is not None and (op is None or reduces(dtype)):
            with self._enter(operation, op=op, elements=buffers[0].size, dtype=dtype.name) as entry:
                entry.by("nccl")
                handle = by_nccl(self._nccl, *devices, async_op=self._handles is not None)
            if handle is not None and self._handles is not None:
                self._handles.append(handle)
            return True
        if algorithm == "nccl":
            raise ValueError(
                f"algorithm 'nccl' cannot be used on this {dtype.name} array: {self._why_not or 'NCCL cannot reduce it'}"
            )
        if by_mpi is not None and self._cuda_aware and (op is None or cuda.reduces(dtype, op)):
            with self._enter(operation, op=op, elements=buffers[0].size, dtype=dtype.name), cuda.calling(*devices):
                by_mpi(*(cuda.view(device, dtype) for device in devices))
            return True
        return False

    def _connect(self, index: int) -> None:
        self._index = index
        try:
            self._nccl = connect(self._mpi, index)
        except NcclUnavailableError as error:  # raised on all ranks
            self._why_not = str(error)
            say_once(f"no NCCL for arrays in GPU memory: {error}")
            self._cuda_aware = cuda.agree(self._mpi).aware


class OnStream(Work):
    """An operation on NCCL's stream. `wait()` makes the caller's current stream wait for it, not the host."""

    def __init__(self, result: Any, handles: Sequence[Handle]) -> None:
        super().__init__()
        self._result, self._handles = result, handles

    def done(self) -> bool:
        return all(handle.done() for handle in self._handles)

    def _finish(self) -> None:
        for handle in self._handles:
            handle.wait()
        self._ended = True
