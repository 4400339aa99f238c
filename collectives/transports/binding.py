"""What the NCCL transport needs of NCCL and CUDA, as an interface, and that interface by CuPy.

Another binding (ctypes, another GPU library, a model in host memory) replaces CuPy by giving the same functions. Streams and
events are the plain numbers that CUDA knows them by, buffers are addresses: nothing here knows an array library's types.
"""

# ruff: noqa: N802 - the names of NCCL's own functions, as CuPy spells them

import functools
import os
import warnings
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from collectives.devices import Device
from collectives.dtypes import DType
from collectives.transports.kernels import CupyKernels, place


class RawCommunicator(Protocol):
    """One rank's NCCL communicator: the methods of `cupy.cuda.nccl.NcclCommunicator` that are used.

    Buffers and streams are addresses, counts are elements, `datatype` and `op` are `Binding.constant`s. Each call queues its work
    on `stream` and returns. Each may raise whatever the binding raises.
    """

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None: ...
    def reduce(
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int
    ) -> None: ...
    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None: ...
    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None: ...
    def reduceScatter(
        self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int
    ) -> None: ...
    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None: ...
    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None: ...
    def check_async_error(self) -> None:
        """Raise what went wrong on the device or in the network since, if anything did."""

    def abort(self) -> None:
        """End all its work, finished or not, and give it back."""

    def destroy(self) -> None:
        """Give it back. Its work has ended."""


class Binding(Protocol):
    """NCCL, and the streams and events of CUDA that order its work."""

    def version(self) -> int:
        """NCCL's version as NCCL gives it: 22501 is 2.25.1."""

    def constant(self, name: str) -> int:
        """The value of a constant of `nccl.h` such as NCCL_FLOAT32; NcclUnavailableError if this NCCL has none of that name."""

    def gpu(self, index: int) -> str:
        """What tells this GPU from all others, on other nodes too, such as its UUID."""

    def device(self, index: int) -> AbstractContextManager[Any]:
        """`with binding.device(i):` makes it this thread's current device. All calls below happen in such a block."""

    def unique_id(self) -> object:
        """A new name for a communicator, made by one rank and sent to the others."""

    def communicator(self, size: int, unique_id: Any, rank: int) -> RawCommunicator:
        """This rank's part of a new communicator. Blocks until all its ranks have called it."""

    def group_start(self) -> None:
        """From here to `group_end` calls are collected; then they start as one."""

    def group_end(self) -> None: ...

    def divide(self, x: Device, divisor: int, dtype: DType, stream: int) -> None:
        """Queue on `stream`: x /= divisor, of floating numbers, rounded once."""

    def upload(self, flat: np.ndarray) -> tuple[Any, Device]:
        """A copy of a host array on the current device, ready in its turn on the stream that it tells; the first keeps it alive."""

    def download(self, array: Any, flat: np.ndarray) -> None:
        """Copy what `upload` gave back to the host, after what is queued on its stream. Blocks until it is there."""

    def stream_create(self) -> int:
        """A stream that does not wait for the default stream, nor it for this one."""

    def stream_wait(self, stream: int, event: int) -> None:
        """What is queued on `stream` from now on starts after what `event` marks now."""

    def event_create(self) -> int: ...

    def event_record(self, event: int, stream: int) -> None:
        """`event` marks all that is queued on `stream` up to now."""

    def event_done(self, event: int) -> bool:
        """Whether what `event` marks has ended. Does not block."""

    def event_destroy(self, event: int) -> None: ...


class NcclUnavailableError(RuntimeError):
    """NCCL cannot be used here; the text says why. Raised before anything is sent."""


class CuPyBinding:
    """The interface above by `cupy.cuda`. Made by `load()`."""

    def __init__(self, cupy: Any) -> None:
        self._cupy, self._nccl, self._runtime = cupy, cupy.cuda.nccl, cupy.cuda.runtime
        self.version = self._nccl.get_version
        self.unique_id = self._nccl.get_unique_id
        self.communicator = self._nccl.NcclCommunicator
        self.group_start = self._nccl.groupStart
        self.group_end = self._nccl.groupEnd
        self.device = cupy.cuda.Device
        self.stream_wait = self._runtime.streamWaitEvent
        self.event_record = self._runtime.eventRecord
        self.event_destroy = self._runtime.eventDestroy

    def constant(self, name: str) -> int:
        value = getattr(self._nccl, name, None)
        if value is None:
            raise NcclUnavailableError(f"this CuPy's NCCL has no {name}; install CuPy 14 or newer")
        return value

    def gpu(self, index: int) -> str:
        uuid = bytes(self._runtime.getDeviceProperties(index)["uuid"])
        return f"GPU {uuid.hex()}" if any(uuid) else f"{os.uname().nodename} {self._runtime.deviceGetPCIBusId(index)}"

    def divide(self, x: Device, divisor: int, dtype: DType, stream: int) -> None:
        assert x.index is not None
        with self._cupy.cuda.ExternalStream(stream):
            flat = place(None, x.address, x.nbytes, dtype.numpy)
            CupyKernels(self._cupy, x.index).queue_divide(flat, divisor, dtype)

    def upload(self, flat: np.ndarray) -> tuple[Any, Device]:
        array = self._cupy.asarray(flat.view(np.uint8))
        stream = self._cupy.cuda.get_current_stream().ptr
        return array, Device(array.data.ptr, array.nbytes, array.device.id, stream)

    def download(self, array: Any, flat: np.ndarray) -> None:
        with array.device:
            array.get(out=flat.view(np.uint8))
            self._cupy.cuda.get_current_stream().synchronize()

    def stream_create(self) -> int:
        return self._runtime.streamCreateWithFlags(self._runtime.streamNonBlocking)

    def event_create(self) -> int:
        return self._runtime.eventCreateWithFlags(self._runtime.eventDisableTiming)

    def event_done(self, event: int) -> bool:
        status = self._runtime.eventQuery(event)
        if status != self._NOT_READY:
            self._runtime.check_status(status)
        return status == 0

    _NOT_READY = 600  # cudaErrorNotReady


@functools.cache
def load() -> Binding:
    """CuPy's binding. Imports CuPy. NcclUnavailableError, with what to install, where CuPy, NCCL or a device is missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns of a missing NCCL; it is said here, by an error
        try:
            import cupy
            from cupy.cuda import nccl
        except ImportError as error:
            raise NcclUnavailableError(f"CuPy cannot be imported ({error}); pip install 'mpitrain[cuda12]'") from error
    if not nccl.available:
        raise NcclUnavailableError("CuPy finds no NCCL library (libnccl.so.2); pip install nvidia-nccl-cu12")
    try:
        num_devices = cupy.cuda.runtime.getDeviceCount()
    except RuntimeError as error:
        raise NcclUnavailableError(f"CuPy finds no CUDA device ({error})") from error
    if num_devices == 0:
        raise NcclUnavailableError("CuPy finds no CUDA device; is CUDA_VISIBLE_DEVICES empty?")
    return CuPyBinding(cupy)


@functools.cache
def is_available() -> bool:
    """Whether this process could use NCCL: if not, none of its communicators ever will. Imports CuPy."""
    try:
        load()
    except NcclUnavailableError:
        return False
    return True


def version_text(version: int) -> str:
    """NCCL's version number as people write it."""
    major, rest = divmod(version, 10000) if version >= 10000 else divmod(version, 1000)
    return f"{major}.{rest // 100}.{rest % 100}"
