"""The functions of NCCL and CUDA that the NCCL transport needs, as an interface, and the implementation by CuPy.

Another binding (ctypes, another GPU library, a model in host memory) can replace CuPy if it has the same functions. Streams and events
are CUDA's handles as ints, and buffers are addresses: the interface uses no types of an array library.
"""

# ruff: noqa: N802 - the names of NCCL's functions, as CuPy spells them

import ctypes
import functools
import logging
import os
import sys
import warnings
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np

from collectives.arrays.devices import DeviceArray
from collectives.arrays.dtypes import DType
from collectives.processes import loaded_libraries
from collectives.transports.gpu.kernels import CupyKernels, place

_log = logging.getLogger("collectives")


class RawCommunicator(Protocol):
    """One rank's NCCL communicator: the methods of `cupy.cuda.nccl.NcclCommunicator` that this package uses.

    Buffers and streams are addresses, counts are elements, `datatype` and `op` are `Binding.constant`s. Each call queues its work
    on `stream` and returns. A call may raise any exception of the binding.
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
        """Raise an error that has happened on the device or in the network, if there is one."""

    def abort(self) -> None:
        """Free the communicator, and stop its unfinished work."""

    def destroy(self) -> None:
        """Free the communicator, whose work has ended."""


class Gpu(NamedTuple):
    """The identity of a GPU. All slices of a GPU (MIG) have the same identity: NCCL does not distinguish them either."""

    host: str
    """The machine's boot id, because containers of one machine may have different names, and different machines the same name."""
    bus: str
    """The GPU's PCI bus id on the machine, such as 0000:81:00.0."""

    def __str__(self) -> str:
        return f"GPU {self.bus}"


class Binding(Protocol):
    """NCCL, and the streams and events of CUDA that order its work."""

    def version(self) -> int:
        """NCCL's version number: 22501 is 2.25.1."""

    def constant(self, name: str) -> int:
        """The value of a constant of `nccl.h` such as NCCL_FLOAT32; NcclUnavailableError if this NCCL does not have the constant."""

    def gpu(self, index: int) -> Gpu:
        """The identity of this GPU among the GPUs of all nodes."""

    def device(self, index: int) -> AbstractContextManager[Any]:
        """`with binding.device(i):` makes device i this thread's current device. All methods below are called in such a block."""

    def unique_id(self) -> object:
        """A new id for a communicator, which one rank makes and sends to the other ranks."""

    def communicator(self, size: int, unique_id: Any, rank: int) -> RawCommunicator:
        """This rank's part of a new communicator. Blocks until all its ranks have called the method."""

    def group_start(self) -> None:
        """Collect the calls until `group_end`, which starts them as one."""

    def group_end(self) -> None: ...

    def divide(self, x: DeviceArray, divisor: int, dtype: DType, stream: int) -> None:
        """Queue on `stream`: x /= divisor, for a floating-point `dtype`, rounded once."""

    def upload(self, flat: np.ndarray) -> tuple[Any, DeviceArray]:
        """Queue a copy of a host array to the current device. The first result keeps the copy alive; the second has its stream."""

    def download(self, array: Any, flat: np.ndarray) -> None:
        """Copy the first result of `upload` back to the host, after the work queued on its stream. Blocks until the copy has ended."""

    def stream_create(self) -> int:
        """A stream of the highest priority. It does not wait for the default stream, nor the default stream for it."""

    def stream_wait(self, stream: int, event: int) -> None:
        """Work queued on `stream` from now on starts after the work that `event` marks now."""

    def event_create(self) -> int: ...

    def event_record(self, event: int, stream: int) -> None:
        """`event` marks all work that is queued on `stream` up to now."""

    def event_done(self, event: int) -> bool:
        """Whether the work that `event` marks has ended. Does not block. Does not disturb CUDA graph captures of any thread.

        Do not call it for an event that was recorded in a capture: CUDA then raises, and ends the capture.
        """

    def event_destroy(self, event: int) -> None: ...

    def is_capturing(self, stream: int) -> bool:
        """Whether work queued on `stream` now is captured in a CUDA graph instead of running."""


class NcclUnavailableError(RuntimeError):
    """NCCL cannot be used here; the text gives the reason. Raised before data is sent."""


class CuPyBinding:
    """The `Binding` by `cupy.cuda`. Made by `load()`."""

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

    def gpu(self, index: int) -> Gpu:
        return Gpu(_boot_id(), self._runtime.deviceGetPCIBusId(index))

    def divide(self, x: DeviceArray, divisor: int, dtype: DType, stream: int) -> None:
        assert x.index is not None
        with self._cupy.cuda.Stream.from_external(_Foreign(stream)):
            flat = place(None, x.address, x.nbytes, dtype.numpy)
            CupyKernels(self._cupy, x.index).queue_divide(flat, divisor, dtype)

    def upload(self, flat: np.ndarray) -> tuple[Any, DeviceArray]:
        array = self._cupy.asarray(flat.view(np.uint8))
        stream = self._cupy.cuda.get_current_stream().ptr
        return array, DeviceArray(array.data.ptr, array.nbytes, array.device.id, stream)

    def download(self, array: Any, flat: np.ndarray) -> None:
        with array.device:
            array.get(out=flat.view(np.uint8))
            self._cupy.cuda.get_current_stream().synchronize()

    def stream_create(self) -> int:
        return self._runtime.streamCreateWithPriority(self._runtime.streamNonBlocking, _HIGHEST_PRIORITY)

    def event_create(self) -> int:
        return self._runtime.eventCreateWithFlags(self._runtime.eventDisableTiming)

    def event_done(self, event: int) -> bool:
        mode, exchange = ctypes.c_int(_CAPTURE_MODE_RELAXED), self._driver.cuThreadExchangeStreamCaptureMode
        exchange(ctypes.byref(mode))
        try:
            status = self._runtime.eventQuery(event)
        finally:
            exchange(ctypes.byref(mode))  # restores the mode, which the first exchange has written to `mode`
        if status != self._NOT_READY:
            self._runtime.check_status(status)
        return status == 0

    @functools.cached_property
    def _driver(self) -> Any:
        """CUDA's driver library, for a function that CuPy does not have."""
        return ctypes.CDLL("libcuda.so.1")

    def is_capturing(self, stream: int) -> bool:
        return bool(self._runtime.streamIsCapturing(stream))

    _NOT_READY = 600  # cudaErrorNotReady


_HIGHEST_PRIORITY = -100  # CUDA clamps a number beyond its range to the range
_CAPTURE_MODE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: this thread may query events during captures


class _Foreign:
    """A stream in NVIDIA's stream protocol, for `Stream.from_external`."""

    def __init__(self, stream: int) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._stream  # version of the protocol, handle


@functools.cache
def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return os.uname().nodename


@functools.cache
def load() -> Binding:
    """CuPy's binding. Imports CuPy.

    NcclUnavailableError, with the packages to install, if CuPy (14 or newer), NCCL or a device is missing, or if CuPy and torch are
    built for different major versions of CUDA.
    """
    torch_cuda = _cuda_of_torch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns of a missing NCCL; the errors below replace the warning
        try:
            import cupy
            from cupy.cuda import nccl
        except ImportError as error:
            raise NcclUnavailableError(f"CuPy cannot be imported ({error}); {_advice(torch_cuda)}") from error
        cupy_cuda = cupy.cuda.runtime.runtimeGetVersion() // 1000
    if not hasattr(cupy.cuda.Stream, "from_external"):
        raise NcclUnavailableError(f"CuPy {cupy.__version__} is too old; {_advice(cupy_cuda)} (CuPy 14 or newer)")
    if torch_cuda is not None and cupy_cuda != torch_cuda:
        raise NcclUnavailableError(
            f"CuPy is built for CUDA {cupy_cuda} and torch for CUDA {torch_cuda}; pip uninstall cupy-cuda{cupy_cuda}x, then "
            f"{_advice(torch_cuda)}"
        )
    if not nccl.available:
        raise NcclUnavailableError(
            f"CuPy finds no NCCL library (libnccl.so.2); pip install nvidia-nccl-cu{cupy_cuda}, or load the NCCL module of the cluster"
        )
    try:
        num_devices = cupy.cuda.runtime.getDeviceCount()
    except RuntimeError as error:
        raise NcclUnavailableError(f"CuPy finds no CUDA device ({error})") from error
    if num_devices == 0:
        raise NcclUnavailableError("CuPy finds no CUDA device; is CUDA_VISIBLE_DEVICES empty?")
    binding = CuPyBinding(cupy)
    _log.info("NCCL %s, %s", version_text(binding.version()), library_path())
    return binding


def _cuda_of_torch() -> int | None:
    """The major version of CUDA for which torch is built; None if torch is not loaded, or is a build for CPUs."""
    torch = sys.modules.get("torch")
    version = None if torch is None else torch.version.cuda
    return None if version is None else int(version.split(".")[0])


def _advice(cuda: int | None) -> str:
    """The command that installs CuPy and NCCL for a major version of CUDA."""
    if cuda not in (12, 13):
        return (
            "pip install 'mpitrain[cuda12]' or 'mpitrain[cuda13]', whichever CUDA the driver has (nvidia-smi shows it)"
        )
    return f"pip install 'mpitrain[cuda{cuda}]'"


def library_path() -> str:
    """The file of the NCCL library that this process has loaded; empty without one."""
    return next(iter(loaded_libraries("libnccl.so")), "")


@functools.cache
def is_available() -> bool:
    """Whether this process can use NCCL. If not, no communicator of this process will use NCCL. Imports CuPy."""
    try:
        load()
    except NcclUnavailableError:
        return False
    return True


def version_text(version: int) -> str:
    """NCCL's version as text, such as "2.25.1"."""
    major, rest = divmod(version, 10000) if version >= 10000 else divmod(version, 1000)
    return f"{major}.{rest // 100}.{rest % 100}"
