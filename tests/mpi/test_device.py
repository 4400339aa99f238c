"""The Communicator's operations on arrays in GPU memory: by NCCL, by CUDA-aware MPI, or through the host, whichever there is.

Without a GPU the arrays lie in host memory and say that they do not; NCCL and the streams are those of device_model.py.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from device_model import ModelBinding

from collectives import Communicator, Work, devices
from collectives.transports import cuda, device
from collectives.transports.binding import NcclUnavailableError
from collectives.transports.cuda import Support
from collectives.transports.lane import Lane
from collectives.transports.nccl import connect

INDEX = 6  # a device that nobody has


class OnGpu:
    """An array that says it is in GPU memory, as CuPy's do."""

    def __init__(self, values: np.ndarray, stream: int) -> None:
        self.values, self.dtype, self.device = values, values.dtype, SimpleNamespace(id=INDEX)
        self._stream = stream

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.values.shape,
            "typestr": self.values.dtype.str,
            "data": (self.values.ctypes.data, False),
            "version": 3,
            "stream": self._stream,
        }


class Gpu:
    """A communicator by one of the three ways, and arrays for it."""

    def __init__(self, comm: Communicator, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.way, self.model = way, ModelBinding(INDEX)
        self.comm = Communicator(comm.mpi.Dup())
        self.stream = self.model.stream()

        def by_model(mpi: Any, index: int) -> Any:
            if way != "nccl":
                raise NcclUnavailableError("not in this test")
            return connect(mpi, index, self.model, lane=Lane())

        monkeypatch.setattr(device, "connect", by_model)
        monkeypatch.setattr(cuda, "agree", lambda mpi: Support(way == "mpi", "as if"))
        monkeypatch.setattr(cuda, "_synchronize", lambda index, stream: self.model.drain())
        # What CuPy would do: the copy, when the work before it in the stream has ended.
        monkeypatch.setattr(devices, "to_host", self._to_host)
        monkeypatch.setattr(devices, "to_device", self._to_device)
        self.staged = 0
        self.kept: list[OnGpu] = []

    def _to_host(self, x: OnGpu, row: Any, *, contents: bool) -> np.ndarray:
        self.staged += 1
        self.model.drain()
        return x.values.reshape(-1).copy() if contents else np.empty(x.values.size, row.numpy)

    def _to_device(self, x: OnGpu, flat: np.ndarray) -> OnGpu:
        x.values.reshape(-1)[...] = flat
        return x

    def full(self, length: int, value: float, dtype: Any = np.float32) -> OnGpu:
        x = OnGpu(np.full(length, value, dtype), self.stream)
        self.kept.append(x)  # as CuPy's pool does until the stream's work with it has ended
        return x

    def read(self, x: OnGpu) -> list[Any]:
        """The elements, as work queued now on the arrays' stream finds them."""
        seen: list[Any] = []
        self.model.queue(self.stream, lambda: seen.extend(x.values.tolist()))
        self.model.drain()
        return seen


@pytest.fixture(params=["nccl", "mpi", "host"])
def gpu(request: pytest.FixtureRequest, comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    rig = Gpu(comm, request.param, monkeypatch)
    yield rig
    rig.model.drain()
    rig.comm.free()
    for communicator in rig.model.communicators:
        communicator.mpi.Free()


def test_every_operation(gpu: Gpu) -> None:
    comm, n, rank = gpu.comm, gpu.comm.size, gpu.comm.rank
    total = sum(range(1, n + 1))
    x = gpu.full(5, rank + 1)
    assert comm.all_reduce(x) is x
    assert gpu.read(x) == [total] * 5
    assert gpu.read(comm.all_reduce(gpu.full(2, rank == 0, bool), "sum")) == [True] * 2
    assert gpu.read(comm.all_reduce(gpu.full(4, rank + 1), "avg")) == [total / n] * 4
    assert gpu.read(comm.all_reduce(gpu.full(3, rank, np.int16), "max")) == [n - 1] * 3, "which NCCL cannot reduce"
    x = gpu.full(3, rank + 1)
    assert gpu.read(comm.reduce(x, n - 1)) == ([total] * 3 if rank == n - 1 else [rank + 1] * 3)
    assert gpu.read(comm.broadcast(gpu.full(3, rank), n - 1)) == [n - 1] * 3
    assert gpu.read(comm.reduce_scatter(gpu.full(2, 0), gpu.full(2 * n, rank + 1))) == [total] * 2
    counts = list(range(1, n + 1))
    expected = [r for r in range(n) for _ in range(counts[r])]
    assert gpu.read(comm.all_gather(gpu.full(sum(counts), -1), gpu.full(rank + 1, rank), counts=counts)) == expected
    whole = gpu.full(2 * n, rank)
    mine = OnGpu(whole.values[2 * rank : 2 * rank + 2], gpu.stream)
    assert gpu.read(comm.all_gather(whole, mine)) == [r for r in range(n) for _ in range(2)], "in place"
    out = gpu.full(n, -1) if rank == 0 else None
    assert comm.gather(out, gpu.full(1, rank)) is out
    assert out is None or gpu.read(out) == list(range(n))
    whole_or_none = OnGpu(np.arange(n, dtype=np.float32), gpu.stream) if rank == 0 else None
    assert gpu.read(comm.scatter(gpu.full(1, -1), whole_or_none)) == [rank]
    assert gpu.read(comm.all_to_all(gpu.full(n, -1), gpu.full(n, rank))) == list(range(n))


def test_what_goes_through_the_host(gpu: Gpu) -> None:
    comm = gpu.comm
    comm.all_reduce(gpu.full(4, 1))
    comm.all_gather(gpu.full(4 * comm.size, 0), gpu.full(4, 1))
    assert (gpu.staged > 0) == (gpu.way == "host")
    before = gpu.staged
    assert gpu.read(comm.all_reduce(gpu.full(4, 1), algorithm="ring")) == [comm.size] * 4
    assert gpu.staged == before + 1, "the schedules add on the host"


def test_asynchronous(gpu: Gpu) -> None:
    n = gpu.comm.size
    works = [gpu.comm.all_reduce(gpu.full(4, value), async_op=True) for value in (1, 2)]
    assert all(isinstance(work, Work) for work in works)
    for value, work in zip((1, 2), works, strict=True):
        x = work.wait()
        assert work.wait() is x
        assert gpu.read(x) == [n * value] * 4
        assert work.done()


def test_nccl_by_name(gpu: Gpu) -> None:
    x = gpu.full(4, 1)
    if gpu.way == "nccl":
        assert gpu.read(gpu.comm.all_reduce(x, algorithm="nccl")) == [gpu.comm.size] * 4
        with pytest.raises(ValueError, match="'nccl' cannot be used on this int16 array: NCCL cannot reduce it"):
            gpu.comm.all_reduce(gpu.full(4, 1, np.int16), algorithm="nccl")
    else:
        with pytest.raises(ValueError, match="'nccl' cannot be used on this float32 array: not in this test"):
            gpu.comm.all_reduce(x, algorithm="nccl")
    with pytest.raises(ValueError, match="algorithm 'nccl' works on arrays in GPU memory"):
        gpu.comm.all_reduce(np.zeros(3), algorithm="nccl")
