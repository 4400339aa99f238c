"""Arrays in the memory of a modelled GPU (device_model.py), and a Communicator that reaches them by one of the ways.

The arrays lie in host memory and say that they do not. They are freed, given out again and poisoned as on a device.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from device_model import ModelBinding, ModelCupyKernels, ModelTorchKernels, Untouchable

from collectives import Communicator
from collectives.arrays import devices
from collectives.communicator import dispatch
from collectives.transports.gpu import cuda, device, watch
from collectives.transports.gpu.binding import NcclUnavailableError
from collectives.transports.gpu.cuda import Support
from collectives.transports.gpu.lane import Lane
from collectives.transports.gpu.nccl import connect

INDEX = 6  # a device that nobody has


class OnGpu:
    """An array that says it is in GPU memory, as CuPy's do. `stream`: the current one of its library, which changes as that does."""

    def __init__(self, values: np.ndarray, stream: int) -> None:
        self.values, self.dtype, self.device = values, values.dtype, SimpleNamespace(id=INDEX)
        self.stream = stream

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.values.shape,
            "typestr": self.values.dtype.str,
            "data": (self.values.ctypes.data, False),
            "version": 3,
            "stream": self.stream,
        }


class Gpu:
    """A communicator by one of the ways, and arrays for it. By MPI, the host may not look at what lies on the device."""

    def __init__(self, comm: Communicator, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.way, self.model = way, ModelBinding(INDEX)
        self.comm = Communicator(comm.mpi.Dup())
        self.stream = self.model.stream()

        def by_model(mpi: Any, index: int) -> Any:
            if way != "nccl":
                raise NcclUnavailableError("not in this test")
            return connect(mpi, index, self.model, lane=Lane())

        self.by_mpi = way.startswith("mpi")
        kernels = ModelTorchKernels(INDEX) if way == "mpi, torch" else ModelCupyKernels(INDEX)
        view, self.num_waits = cuda.view, 0
        monkeypatch.setattr(device, "connect", by_model)
        monkeypatch.setattr(device, "kernels_of", lambda index: kernels)
        monkeypatch.setattr(watch, "over", lambda queue: None)  # a thread; the model is for one
        monkeypatch.setattr(cuda, "agree", lambda mpi, make: Support(self.by_mpi, "as if"))
        monkeypatch.setattr(cuda, "takes_messages", lambda index: self.by_mpi)
        monkeypatch.setattr(cuda, "view", lambda x, dtype: view(x, dtype).view(Untouchable))
        monkeypatch.setattr(cuda, "_synchronize", self._wait_for_stream)
        # What CuPy would do: the copy, when the work before it in the stream has ended.
        monkeypatch.setattr(devices, "to_host", self._to_host)
        monkeypatch.setattr(devices, "to_device", self._to_device)
        key_of = dispatch.key_of
        monkeypatch.setattr(
            dispatch, "key_of", lambda x: key_of(x.values) if isinstance(x, OnGpu) else key_of(x)
        )  # as tensors
        self.staged = 0

    def _wait_for_stream(self, index: int, stream: int) -> None:
        self.num_waits += 1
        self.model.drain()

    def _to_host(self, x: OnGpu, row: Any, *, contents: bool) -> np.ndarray:
        self.staged += 1
        self.model.drain()
        return x.values.reshape(-1).copy() if contents else np.empty(x.values.size, row.numpy)

    def _to_device(self, x: OnGpu, flat: np.ndarray) -> OnGpu:
        x.values.reshape(-1)[...] = flat
        return x

    def array(self, values: Any, dtype: Any = None) -> OnGpu:
        """Filled by a kernel that is only queued."""
        wanted = np.array(values, dtype)
        memory = self.model.allocate(wanted.nbytes, self.stream)
        x = OnGpu(memory.view(wanted.dtype).reshape(wanted.shape), self.stream)
        self.model.write(self.stream, x.values.ctypes.data, wanted)
        return x

    def full(self, length: int, value: float, dtype: Any = np.float32) -> OnGpu:
        return self.array(np.full(length, value, dtype))

    def read(self, x: OnGpu, stream: int | None = None) -> list[Any]:
        """The elements, as work queued now finds them on a stream, or on the one that the arrays are filled on."""
        seen: list[Any] = []
        self.model.queue(self.stream if stream is None else stream, lambda: seen.extend(x.values.tolist()))
        self.model.drain()
        return seen

    def nccl_calls(self) -> list[str]:
        """What NCCL was called for."""
        return [call for communicator in self.model.communicators for call in communicator.calls]

    def close(self) -> None:
        """Collective."""
        self.model.drain()
        self.comm.free()
        for communicator in self.model.communicators:
            communicator.mpi.Free()
        assert not self.model.violations
