"""The collectives in device memory as NCCL's calls on addresses. nccl_queue.py has their order and their errors.

Operations without a reduction move bytes; a reduction uses the NCCL column of the dtype table. NCCL adds fp16 and bf16 in fp32 and
rounds at every hop. An average is a sum that is divided once, on NCCL's stream: NCCL_AVG would scale each rank's elements first.
"""

import functools
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays.devices import DeviceArray
from collectives.arrays.dtypes import TABLE, DType, effective_op
from collectives.diagnosis.together import together
from collectives.transports.gpu.binding import Binding, Gpu, NcclUnavailableError, RawCommunicator, load, version_text
from collectives.transports.gpu.lane import Lane, lane_of
from collectives.transports.gpu.nccl_queue import DeviceCall, Handle, NcclError, Queue
from collectives.transports.transport import Counts, parts

_OPS = {"sum": "NCCL_SUM", "avg": "NCCL_SUM", "prod": "NCCL_PROD", "max": "NCCL_MAX", "min": "NCCL_MIN"}

# [Note: shared GPUs] NCCL takes one rank per GPU, and a slice of a GPU (MIG) counts as the GPU. From this version on an environment
# variable, which NVIDIA calls experimental, allows more ranks; we have seen two ranks per GPU work. The kernels of both ranks wait
# for each other and must fit on the GPU at the same time, so the number of thread blocks (CTAs) of each is limited.
_SHARED_GPU_VERSION, _SHARED_GPU_VARIABLE = 23003, "NCCL_MULTI_RANK_GPU_ENABLE"
_MOST_RANKS_PER_GPU = 2
_MAX_CTAS_VARIABLE, _MAX_CTAS = "NCCL_MAX_CTAS", "8"
_TRIAL_S = 30.0


def reduces(dtype: DType) -> bool:
    """Whether NCCL can reduce this type. It has no 16-bit integers, which go through the host. NCCL can move every type."""
    return dtype.nccl is not None or dtype.name == "bool"


def connect(
    mpi: Any, index: int, binding: Binding | None = None, *, lane: Lane | None = None, timeout_s: float = 600.0
) -> "Nccl":
    """The NCCL communicator of the ranks of `mpi` (an mpi4py communicator), each with device `index` of its process. Collective.

    `binding`: CuPy's if not given. `timeout_s`: the longest wait of the host for the device. Raises on all ranks: NcclUnavailableError
    if a rank has no NCCL, or if ranks share a GPU in a way that NCCL does not allow; NcclError if NCCL cannot connect the ranks.
    [Note: shared GPUs]
    """
    with together(mpi, "NCCL cannot be used"):
        binding = load() if binding is None else binding
        version, gpu = binding.version(), binding.gpu(index)
    seats = [_Seat(*seat) for seat in mpi.allgather((gpu, version, os.environ.get(_SHARED_GPU_VARIABLE) == "1"))]
    unique_id, is_shared = None, False
    with together(mpi, "NCCL cannot be used"):
        is_shared = _check_seats(seats)
        if is_shared:
            os.environ.setdefault(_MAX_CTAS_VARIABLE, _MAX_CTAS)
        if mpi.rank == 0:
            unique_id = binding.unique_id()
    unique_id = mpi.bcast(unique_id)
    raw: RawCommunicator | None = None
    nccl: Nccl | None = None
    try:
        with together(mpi, f"NCCL {version_text(version)} cannot connect {mpi.size} ranks"):
            try:
                with binding.device(index):
                    raw = binding.communicator(mpi.size, unique_id, mpi.rank)
            except Exception as error:
                raise NcclError(str(error)) from error
        nccl = Nccl(raw, mpi.rank, mpi.size, index, binding, lane_of(index) if lane is None else lane, timeout_s)
        if is_shared:
            with together(mpi, f"NCCL {version_text(version)} does not work on a shared GPU"):
                _try(nccl)
    except Exception as error:
        if nccl is not None:
            nccl.abort("a rank cannot use NCCL")
        elif raw is not None:  # connected here, but not on another rank
            with suppress(Exception), binding.device(index):
                raw.abort()
        if is_shared:  # an experimental feature of NCCL, so the caller goes on without NCCL
            raise NcclUnavailableError(str(error)) from error
        raise
    return nccl


def _try(nccl: "Nccl") -> None:
    """One small all-reduce: NCCL connects the ranks in the first one, and the kernels must fit on the shared GPU at the same time."""
    one, where = nccl.upload(np.ones(1, np.float32))
    nccl.all_reduce(where, "sum", TABLE["float32"])
    nccl.synchronize(_TRIAL_S)
    del one  # keeps the memory alive until here


class _Seat(NamedTuple):
    """The GPU and the version of NCCL of a rank."""

    gpu: Gpu
    version: int
    takes_shared: bool  # whether the variable allows shared GPUs


def _check_seats(seats: Sequence[_Seat]) -> bool:
    """Whether ranks share a GPU. NcclUnavailableError if NCCL does not allow that, or if the ranks' versions of NCCL differ."""
    versions = sorted({seat.version for seat in seats})
    if len(versions) > 1:
        raise NcclUnavailableError(
            f"the ranks have different versions of NCCL: {', '.join(map(version_text, versions))}"
        )
    ranks: dict[Gpu, list[int]] = {}
    for rank, seat in enumerate(seats):
        ranks.setdefault(seat.gpu, []).append(rank)
    gpu, most = max(ranks.items(), key=lambda item: len(item[1]))
    if len(most) == 1:
        return False
    is_enabled = versions[0] >= _SHARED_GPU_VERSION and all(seat.takes_shared for seat in seats)
    if is_enabled and len(most) <= _MOST_RANKS_PER_GPU:
        return True
    raise NcclUnavailableError(
        f"NCCL takes one rank per GPU, and ranks {', '.join(map(str, most))} share a GPU ({gpu}, or slices of it); start one rank "
        f"per GPU and choose the device by comm.node.rank. From NCCL {version_text(_SHARED_GPU_VERSION)} on (here "
        f"{version_text(versions[0])}) {_SHARED_GPU_VARIABLE}=1 on all ranks lets {_MOST_RANKS_PER_GPU} ranks share a GPU"
    )


class Nccl(Queue):
    """The collectives of a communicator's ranks on device memory. Made by `connect`.

    All ranks call the same operations in the same order. The arguments are those of `Transport`, always with the dtype. Arrays are
    `DeviceArray` records on device `index`, of `dtype`; their sizes follow from their bytes, and the caller checks them. Operations are
    in place if the addresses are equal. A method returns None, and later work on the streams of its arrays follows the operation; with
    `async_op` it returns a `Handle`. NcclError names the operation; DTypeError or ValueError if `dtype` does not have `op`; TypeError
    for a dtype that NCCL cannot reduce (see `reduces`).
    """

    # Collectives

    def all_reduce(self, x: DeviceArray, op: str, dtype: DType, *, async_op: bool = False) -> Handle | None:
        """Every rank's `x` becomes the reduction of all ranks' `x`."""
        kind, raw_op = self._reduction(op, dtype)
        count = x.nbytes // dtype.itemsize
        calls = self._call(count, self._raw.allReduce, x.address, x.address, count, kind, raw_op)
        return self._run("all_reduce", [x], dtype, calls, async_op, self._average(op, x, dtype))

    def reduce(self, x: DeviceArray, op: str, root: int, dtype: DType, *, async_op: bool = False) -> Handle | None:
        """The root's `x` becomes the reduction of all ranks' `x`; the other ranks' `x` do not change."""
        kind, raw_op = self._reduction(op, dtype)
        count = x.nbytes // dtype.itemsize
        target = x.address if root == self.rank else 0  # NCCL uses it only on the root
        calls = self._call(count, self._raw.reduce, x.address, target, count, kind, raw_op, root)
        after = self._average(op, x, dtype) if root == self.rank else []
        return self._run("reduce", [x], dtype, calls, async_op, after)

    def reduce_scatter(
        self, out: DeviceArray, x: DeviceArray, op: str, counts: Sequence[int], dtype: DType, *, async_op: bool = False
    ) -> Handle | None:
        """`out` becomes this rank's part of the reduction of all ranks' `x`; it may be this rank's part of `x`.

        `counts`: the number of elements of each rank's part.
        """
        kind, raw_op = self._reduction(op, dtype)
        if len(set(counts)) == 1:
            count = out.nbytes // dtype.itemsize
            calls = self._call(count, self._raw.reduceScatter, x.address, out.address, count, kind, raw_op)
        else:
            calls = []
            for root, (start, end) in enumerate(parts(counts)):
                part, count = x.address + start * dtype.itemsize, end - start
                target = out.address if root == self.rank else 0
                calls += self._call(count, self._raw.reduce, part, target, count, kind, raw_op, root)
        return self._run("reduce_scatter", [x, out], dtype, calls, async_op, self._average(op, out, dtype))

    def all_gather(
        self, out: DeviceArray, x: DeviceArray, counts: Sequence[int], dtype: DType, *, async_op: bool = False
    ) -> Handle | None:
        """`out` becomes all ranks' `x` in order of rank; `x` may be this rank's part of `out`. `counts`: as in `reduce_scatter`."""
        if len(set(counts)) == 1:
            calls = self._call(x.nbytes, self._raw.allGather, x.address, out.address, x.nbytes, self._bytes)
        else:
            calls = []
            for root, (start, end) in enumerate(parts(counts)):
                target, nbytes = out.address + start * dtype.itemsize, (end - start) * dtype.itemsize
                source = x.address if root == self.rank else target
                calls += self._call(nbytes, self._raw.broadcast, source, target, nbytes, self._bytes, root)
        return self._run("all_gather", [out, x], dtype, calls, async_op)

    def broadcast(self, x: DeviceArray, root: int, dtype: DType, *, async_op: bool = False) -> Handle | None:
        """Every rank's `x` becomes the root's `x`."""
        calls = self._call(x.nbytes, self._raw.broadcast, x.address, x.address, x.nbytes, self._bytes, root)
        return self._run("broadcast", [x], dtype, calls, async_op)

    def gather(
        self, out: DeviceArray | None, x: DeviceArray, root: int, dtype: DType, *, async_op: bool = False
    ) -> Handle | None:
        """The root's `out` becomes all ranks' `x` in order of rank; other ranks pass None. The root's `x` may be its part of `out`."""
        in_place = out is not None and out.address + root * x.nbytes == x.address
        calls = [] if in_place else self._send(x.address, x.nbytes, root)
        if out is not None:
            for peer in range(self.size):
                if not (in_place and peer == root):
                    calls += self._recv(out.address + peer * x.nbytes, x.nbytes, peer)
        return self._run("gather", [x] if out is None else [out, x], dtype, calls, async_op)

    def scatter(
        self, out: DeviceArray, x: DeviceArray | None, root: int, dtype: DType, *, async_op: bool = False
    ) -> Handle | None:
        """Every rank's `out` becomes its part of the root's `x`; other ranks pass None. The root's `out` may be its part of `x`."""
        in_place = x is not None and x.address + root * out.nbytes == out.address
        calls = [] if in_place else self._recv(out.address, out.nbytes, root)
        if x is not None:
            for peer in range(self.size):
                if not (in_place and peer == root):
                    calls += self._send(x.address + peer * out.nbytes, out.nbytes, peer)
        return self._run("scatter", [out] if x is None else [out, x], dtype, calls, async_op)

    def all_to_all(
        self, out: DeviceArray, x: DeviceArray, counts: Counts | None, dtype: DType, *, async_op: bool = False
    ) -> Handle | None:
        """Part i of `x` goes to rank i; part i of `out` comes from rank i. `x` and `out` must not overlap.

        `counts`: the number of elements of each part; None: parts are equal.
        """
        send, recv = counts or Counts.equal(x.nbytes // dtype.itemsize, self.size)
        calls = list[DeviceCall]()
        for peer, (to, source) in enumerate(zip(parts(send), parts(recv), strict=True)):
            calls += self._send(x.address + to[0] * dtype.itemsize, send[peer] * dtype.itemsize, peer)
            calls += self._recv(out.address + source[0] * dtype.itemsize, recv[peer] * dtype.itemsize, peer)
        return self._run("all_to_all", [out, x], dtype, calls, async_op)

    # Point to point. Two ranks that both send before they receive must use a group, else they wait for each other forever.

    def send(self, x: DeviceArray, peer: int, dtype: DType) -> None:
        """Send `x` to rank `peer`, which receives as many bytes. NCCL has no tags: messages arrive in the order of sending."""
        self._run("send", [x], dtype, self._send(x.address, x.nbytes, peer), False)

    def recv(self, x: DeviceArray, peer: int, dtype: DType) -> None:
        """Receive the next message of rank `peer` into `x`."""
        self._run("recv", [x], dtype, self._recv(x.address, x.nbytes, peer), False)

    def upload(self, flat: np.ndarray) -> tuple[Any, DeviceArray]:
        """A copy on the device of an array in host memory, and its place; see `Binding.upload`."""
        with self._binding.device(self.index):
            return self._binding.upload(flat)

    def download(self, array: Any, flat: np.ndarray) -> None:
        """Copy an array of `upload` back to host memory. Blocks until the operations on this array have ended."""
        self._binding.download(array, flat)

    # Parts of the operations above

    def _reduction(self, op: str, dtype: DType) -> tuple[int, int]:
        """NCCL's constants for an element type and an operation."""
        raw_op = effective_op(dtype, op)
        if not reduces(dtype):
            raise TypeError(
                f"NCCL cannot reduce {dtype.name}; expected a type of 8, 32 or 64 bits, or a floating-point type"
            )
        kind = self._bytes if dtype.nccl is None else self._binding.constant(dtype.nccl)
        return kind, self._binding.constant(_OPS[raw_op])

    def _average(self, op: str, x: DeviceArray, dtype: DType) -> list[DeviceCall]:
        """The call that divides the sum in `x`, for an average."""
        if op != "avg" or not x.nbytes:
            return []
        return [functools.partial(self._binding.divide, x, self.size, dtype, self._stream)]

    def _call(self, count: int, method: Callable[..., None], *arguments: int) -> list[DeviceCall]:
        """The call to issue; no call if there are no elements, which is then true on all ranks."""
        return [functools.partial(method, *arguments, self._stream)] if count else []

    def _send(self, address: int, nbytes: int, peer: int) -> list[DeviceCall]:
        return self._call(nbytes, self._raw.send, address, nbytes, self._bytes, peer)

    def _recv(self, address: int, nbytes: int, peer: int) -> list[DeviceCall]:
        return self._call(nbytes, self._raw.recv, address, nbytes, self._bytes, peer)
