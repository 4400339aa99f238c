"""The NCCL transport's contract, on a modelled device (device_model.py) and, where every rank has a GPU, on NCCL itself.

Each case queues a kernel that writes the input on the caller's stream, the operation, and a kernel that reads the output: all that
makes the result right is the order of the streams. Inputs are small integers by a formula, exact in every dtype.
"""

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from closed_forms import inputs, reduced
from device_model import CONSTANTS, ModelBinding, ModelCommunicator

from collectives import Communicator
from collectives.arrays.devices import DeviceArray
from collectives.arrays.dtypes import TABLE, DType, DTypeError
from collectives.transports.gpu import binding as bindings
from collectives.transports.gpu import nccl as transport
from collectives.transports.gpu.lane import Lane
from collectives.transports.gpu.nccl import Nccl, connect, reduces
from collectives.transports.gpu.nccl_queue import NcclError
from collectives.transports.transport import Counts

pytestmark = pytest.mark.ranks(3)

Read = Callable[[], np.ndarray]
REDUCIBLE = [row for row in TABLE.values() if reduces(row)]


def sizes(n: int) -> list[int]:
    return sorted({0, 1, n - 1, n + 1, 1031})


def check(result: np.ndarray, expected: np.ndarray, case: object) -> None:
    assert result.dtype == expected.dtype and result.tobytes() == expected.tobytes(), case


class ModelRig:
    """Queues kernels of the tests' own on the modelled device."""

    def __init__(self, nccl_first: bool) -> None:
        self.binding = ModelBinding(nccl_first=nccl_first)
        self.index, self.lane = self.binding.index, Lane()
        self.stream, self.other_stream = self.binding.stream(), self.binding.stream()
        self._arrays: list[np.ndarray] = []

    def array(self, nbytes: int) -> DeviceArray:
        """Device memory full of garbage."""
        array = self.binding.allocate(nbytes, self.stream)
        self._arrays.append(array)
        return DeviceArray(array.ctypes.data, nbytes, self.index, self.stream)

    def write(self, x: DeviceArray, values: np.ndarray) -> None:
        """Queue on the stream of `x` what writes `values` into it."""
        self.binding.write(x.stream, x.address, values)

    def read(self, x: DeviceArray, row: DType) -> Read:
        """Queue on the stream of `x` what reads it; the values, once all has ended."""
        source, copy = self._find(x), np.empty(x.nbytes, np.uint8)
        self.binding.queue(x.stream, lambda: copy.__setitem__(slice(None), source))
        return lambda: copy.view(row.numpy)

    def finish(self) -> None:
        """Wait for all that is queued."""
        self.binding.drain()
        self._arrays.clear()

    def close(self) -> None:
        for comm in self.binding.communicators:
            comm.mpi.Free()
        assert not self.binding.violations

    def _find(self, x: DeviceArray) -> np.ndarray:
        for array in self._arrays:
            if 0 <= x.address - array.ctypes.data <= array.nbytes - x.nbytes:
                start = x.address - array.ctypes.data
                return array[start : start + x.nbytes]
        raise AssertionError("no such memory")


class GpuRig:
    """The same on a real device, by CuPy; each write comes after a kernel that takes its time."""

    def __init__(self, local_rank: int) -> None:
        self.binding, self.lane = bindings.load(), Lane()
        import cupy

        self._cupy = cupy
        self.index = local_rank % cupy.cuda.runtime.getDeviceCount()
        cupy.cuda.Device(self.index).use()
        self._streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
        self.stream, self.other_stream = (stream.ptr for stream in self._streams)
        self._arrays: list[Any] = []
        self._ballast = cupy.ones(1 << 22, cupy.float32)

    def array(self, nbytes: int) -> DeviceArray:
        array = self._cupy.full(max(nbytes, 1), 0x3B, self._cupy.uint8)
        self._cupy.cuda.get_current_stream().synchronize()
        self._arrays.append(array)
        return DeviceArray(array.data.ptr, nbytes, self.index, self.stream)

    def write(self, x: DeviceArray, values: np.ndarray) -> None:
        if not x.nbytes:
            return
        with self._stream(x):
            source = self._cupy.asarray(values.view(np.uint8))
            for _ in range(20):
                self._cupy.sin(self._ballast, out=self._ballast)
            self._find(x)[...] = source

    def read(self, x: DeviceArray, row: DType) -> Read:
        with self._stream(x):
            copy = self._find(x).copy() if x.nbytes else self._cupy.empty(0, self._cupy.uint8)
        return lambda: self._cupy.asnumpy(copy).view(row.numpy)

    def finish(self) -> None:
        for stream in self._streams:
            stream.synchronize()
        self._arrays.clear()

    def close(self) -> None:
        pass

    def _stream(self, x: DeviceArray) -> Any:
        return next(stream for stream in self._streams if stream.ptr == x.stream)

    def _find(self, x: DeviceArray) -> Any:
        for array in self._arrays:
            if 0 <= x.address - array.data.ptr < array.nbytes:
                start = x.address - array.data.ptr
                return array[start : start + x.nbytes]
        raise AssertionError("no such memory")


@pytest.fixture(params=["nccl first", "nccl last", pytest.param("gpu", marks=pytest.mark.gpu)])
def rig(request: pytest.FixtureRequest, comm: Communicator) -> Iterator[Any]:
    if request.param == "gpu":
        try:
            rig: Any = GpuRig(comm.node.rank)
        except bindings.NcclUnavailableError as error:
            pytest.skip(str(error))
    else:
        rig = ModelRig(nccl_first=request.param == "nccl first")
    yield rig
    rig.close()


@pytest.fixture
def nccl(rig: Any, comm: Communicator) -> Iterator[Nccl]:
    try:
        nccl = connect(comm.mpi, rig.index, rig.binding, lane=rig.lane)
    except bindings.NcclUnavailableError as error:  # on all ranks
        pytest.skip(str(error))
    yield nccl
    nccl.free()


def place(x: DeviceArray, row: DType, start: int, count: int) -> DeviceArray:
    """`count` elements of `x` from `start` on."""
    return dataclasses.replace(x, address=x.address + start * row.itemsize, nbytes=count * row.itemsize)


def test_all_reduce_and_reduce(rig: Any, nccl: Nccl) -> None:
    n, rank = nccl.size, nccl.rank
    for row in REDUCIBLE:
        for op in sorted(row.ops):
            for size in sizes(n):
                expected = reduced(op, row, size, n)
                x, y = rig.array(size * row.itemsize), rig.array(size * row.itemsize)
                for array in (x, y):
                    rig.write(array, inputs(op, row, size, rank))
                root = size % n
                assert nccl.all_reduce(x, op, row) is None
                assert nccl.reduce(y, op, root, row) is None
                everywhere, at_root = rig.read(x, row), rig.read(y, row)
                rig.finish()
                check(everywhere(), expected, (row.name, op, size))
                if rank == root:
                    check(at_root(), expected, (row.name, op, size))
                else:
                    check(at_root(), inputs(op, row, size, rank), "the others' stay as they are")


def test_reduce_scatter(rig: Any, nccl: Nccl) -> None:
    n, rank = nccl.size, nccl.rank
    for row in REDUCIBLE:
        for op in sorted(row.ops) if row.name in ("float32", "bfloat16", "bool") else ["sum"]:
            for counts in ([5] * n, [0] * n, [1031] * n, list(range(n)), [7 * (r == n - 1) for r in range(n)]):
                start, total = sum(counts[:rank]), sum(counts)
                expected = reduced(op, row, total, n)[start : start + counts[rank]]
                for in_place in (False, True):
                    x = rig.array(total * row.itemsize)
                    out = place(x, row, start, counts[rank]) if in_place else rig.array(counts[rank] * row.itemsize)
                    rig.write(x, inputs(op, row, total, rank))
                    assert nccl.reduce_scatter(out, x, op, counts, row) is None
                    result, left = rig.read(out, row), rig.read(x, row)
                    rig.finish()
                    check(result(), expected, (row.name, op, counts, in_place))
                    if not in_place:
                        check(left(), inputs(op, row, total, rank), "x is left as it is")


def test_all_gather(rig: Any, nccl: Nccl) -> None:
    n, rank = nccl.size, nccl.rank
    for row in TABLE.values():
        for counts in ([5] * n, [0] * n, [1031] * n, list(range(n)), [7 * (r == n - 1) for r in range(n)]):
            start, total = sum(counts[:rank]), sum(counts)
            whole = inputs("sum", row, total, 1)
            for in_place in (False, True):
                out = rig.array(total * row.itemsize)
                x = place(out, row, start, counts[rank]) if in_place else rig.array(counts[rank] * row.itemsize)
                rig.write(x, whole[start : start + counts[rank]])
                assert nccl.all_gather(out, x, counts, row) is None
                result = rig.read(out, row)
                rig.finish()
                check(result(), whole, (row.name, counts, in_place))


def test_moving_operations(rig: Any, nccl: Nccl) -> None:
    n, rank = nccl.size, nccl.rank
    for row in TABLE.values():
        for size in sizes(n):
            whole = inputs("sum", row, size * n * n, 1).reshape(n, n * size)
            mine = slice(rank * size, (rank + 1) * size)
            part, full = size * row.itemsize, size * n * row.itemsize
            root = (size + 1) % n
            at_root = rank == root
            for in_place in (False, True):
                b, g, s = rig.array(full), rig.array(full), rig.array(full)
                own = at_root and in_place
                x = place(g, row, root * size, size) if own else rig.array(part)
                out = place(s, row, root * size, size) if own else rig.array(part)
                y, z = rig.array(full), rig.array(full)
                rig.write(b, whole[rank])
                rig.write(x, whole[0][mine])
                rig.write(s, whole[rank])
                rig.write(y, whole[rank])
                nccl.broadcast(b, root, row)
                nccl.gather(g if at_root else None, x, root, row)
                nccl.scatter(out, s if at_root else None, root, row)
                nccl.all_to_all(z, y, None, row)
                read = [rig.read(array, row) for array in (b, g, out, z)]
                rig.finish()
                case = row.name, size, in_place
                check(read[0](), whole[root], case)
                if at_root:
                    check(read[1](), whole[0], case)
                check(read[2](), whole[root][mine], case)
                check(read[3](), np.ascontiguousarray(whole[:, mine]).reshape(-1), case)


def test_all_to_all_of_parts_of_any_sizes(rig: Any, nccl: Nccl) -> None:
    n, rank, row = nccl.size, nccl.rank, TABLE["float32"]
    sent = np.random.default_rng(n).choice([0, 1, 7, 1031], (n, n))
    parts = [[inputs("sum", row, sent[r, p], r * n + p) for p in range(n)] for r in range(n)]
    counts = Counts(sent[rank].tolist(), sent[:, rank].tolist())
    x, out = (rig.array(sum(lengths) * row.itemsize) for lengths in counts)
    rig.write(x, np.concatenate(parts[rank]))
    nccl.all_to_all(out, x, counts, row)
    read = rig.read(out, row)
    rig.finish()
    check(read(), np.concatenate([parts[r][rank] for r in range(n)]), "parts")


def test_send_and_recv(rig: Any, nccl: Nccl) -> None:
    """Round the ring: each rank sends before it receives, which needs the group."""
    n, rank = nccl.size, nccl.rank
    for row in TABLE.values():
        for size in sizes(n):
            x, y = rig.array(size * row.itemsize), rig.array(size * row.itemsize)
            rig.write(x, inputs("sum", row, size, rank))
            with nccl.group():
                nccl.send(x, (rank + 1) % n, row)
                nccl.recv(y, (rank - 1) % n, row)
            result = rig.read(y, row)
            rig.finish()
            check(result(), inputs("sum", row, size, (rank - 1) % n), (row.name, size))
    if n > 1 and rank < 2:  # alone, and in order
        row = TABLE["int32"]
        arrays = [rig.array(4 * 3) for _ in range(2)]
        for i, array in enumerate(arrays):
            if rank == 0:
                rig.write(array, np.full(3, i, np.int32))
                nccl.send(array, 1, row)
            else:
                nccl.recv(array, 0, row)
        results = [rig.read(array, row) for array in arrays]
        rig.finish()
        assert [result().tolist() for result in results] == [[0] * 3, [1] * 3]


def test_a_group_of_collectives_starts_as_one(rig: Any, nccl: Nccl) -> None:
    n, rank = nccl.size, nccl.rank
    row = TABLE["bfloat16"]
    x, y, out = (rig.array(6 * row.itemsize * k) for k in (1, 1, n))
    y = dataclasses.replace(y, stream=rig.other_stream)
    rig.write(x, inputs("sum", row, 6, rank))
    rig.write(y, inputs("max", row, 6, rank))
    with nccl.group():
        assert nccl.all_reduce(x, "sum", row) is None
        handle = nccl.all_reduce(y, "max", row, async_op=True)
        nccl.all_gather(out, place(out, row, rank * 6, 6), [6] * n, row)
        assert handle is not None
        with pytest.raises(RuntimeError, match="after the group's end"):
            handle.wait()
        with pytest.raises(RuntimeError, match="group inside a group"), nccl.group():
            pass
    handle.wait()
    results = rig.read(x, row), rig.read(y, row)
    rig.finish()
    assert handle.done()
    check(results[0](), reduced("sum", row, 6, n), "all_reduce")
    check(results[1](), reduced("max", row, 6, n), "all_reduce")

    z = rig.array(4)
    with suppress(ZeroDivisionError), nccl.group():
        nccl.all_reduce(z, "sum", TABLE["float32"])
        raise ZeroDivisionError
    rig.write(z, np.ones(1, np.float32))
    untouched = rig.read(z, TABLE["float32"])
    rig.finish()
    assert untouched().tolist() == [1.0], "nothing of a group that failed is started"


def test_async_operations_are_ordered_by_wait_for_any_stream(rig: Any, nccl: Nccl) -> None:
    row, n = TABLE["float32"], nccl.size
    expected = reduced("sum", row, 1031, n)
    for waiter in (rig.stream, rig.other_stream):
        x = rig.array(1031 * 4)
        rig.write(x, inputs("sum", row, 1031, nccl.rank))
        handle = nccl.all_reduce(x, "sum", row, async_op=True)
        assert handle is not None
        handle.wait(waiter)
        # The stream of the call is ordered too: what reuses the array's memory there must not come too early.
        result, again = rig.read(dataclasses.replace(x, stream=waiter), row), rig.read(x, row)
        while not handle.done():
            pass
        rig.finish()
        handle.wait()
        check(result(), expected, waiter)
        check(again(), expected, waiter)


def test_arrays_on_two_streams(rig: Any, nccl: Nccl) -> None:
    """An operation waits for the streams of all its arrays, and they for it."""
    row, n, rank = TABLE["float32"], nccl.size, nccl.rank
    x, out = rig.array(5 * 4), dataclasses.replace(rig.array(5 * 4 * n), stream=rig.other_stream)
    rig.write(x, inputs("sum", row, 5, rank))
    rig.write(out, np.zeros(5 * n, np.float32))  # too late, it would wipe the result away
    nccl.all_gather(out, x, [5] * n, row)
    result = rig.read(out, row)
    rig.write(x, np.zeros(5, np.float32))  # too early, it would be gathered
    rig.finish()
    check(result(), np.concatenate([inputs("sum", row, 5, r) for r in range(n)]), "all_gather")


def test_what_is_refused(rig: Any, nccl: Nccl) -> None:
    x = rig.array(8)
    for name in ("int16", "uint16"):
        assert not reduces(TABLE[name])
        with pytest.raises(TypeError, match=f"NCCL cannot reduce {name}"):
            nccl.all_reduce(x, "sum", TABLE[name])
    with pytest.raises(DTypeError, match="op 'avg' is not defined for int32"):
        nccl.all_reduce(x, "avg", TABLE["int32"])
    with pytest.raises(ValueError, match="'xor' is unknown"):
        nccl.all_reduce(x, "xor", TABLE["int32"])
    elsewhere = nccl.index + 1
    with pytest.raises(ValueError, match=f"device {elsewhere}, but this communicator's NCCL is on device {nccl.index}"):
        nccl.broadcast(dataclasses.replace(x, index=elsewhere), 0, TABLE["int32"])
    nccl.all_reduce(x, "sum", TABLE["int64"])  # none of this broke anything
    rig.finish()


# What needs the model: errors that a sound device does not show


@pytest.fixture
def model(comm: Communicator) -> Iterator[ModelRig]:
    rig = ModelRig(nccl_first=True)
    yield rig
    rig.close()


def test_the_model_catches_a_missing_wait(comm: Communicator, model: ModelRig, monkeypatch: pytest.MonkeyPatch) -> None:
    row = TABLE["float32"]
    for nccl_first in (True, False):
        model.binding.nccl_first = nccl_first
        nccl = connect(comm.mpi, model.index, model.binding, lane=Lane())
        for forgotten in ("nccl", "caller"):
            x = model.array(4)
            model.write(x, np.ones(1, np.float32))
            with monkeypatch.context() as patch:
                wait = model.binding.stream_wait
                patch.setattr(
                    model.binding,
                    "stream_wait",
                    lambda stream, event, wait=wait, forgotten=forgotten: (
                        None if (stream in model.binding.own) == (forgotten == "nccl") else wait(stream, event)
                    ),
                )
                nccl.all_reduce(x, "sum", row)
            result = model.read(x, row)
            model.finish()
            right = result().tolist() == [float(comm.size)]
            assert right == (nccl_first != (forgotten == "nccl")) or comm.size == 1
        nccl.free()


def test_an_asynchronous_error_aborts_and_names_the_operations(comm: Communicator, model: ModelRig) -> None:
    row = TABLE["float32"]
    for notice in ("operation", "wait", "done", "synchronize"):
        nccl = connect(comm.mpi, model.index, model.binding, lane=model.lane)
        raw = model.binding.communicators[-1]
        x = model.array(20)
        handle = nccl.all_reduce(x, "sum", row, async_op=True)
        assert handle is not None
        raw.error = RuntimeError("NCCL_ERROR_REMOTE_ERROR")
        broken = f"rank {comm.rank} of {comm.size}.*all_reduce.5 x float32.*NCCL_ERROR_REMOTE_ERROR.*aborted"
        notices = {
            "operation": lambda nccl=nccl, x=x: nccl.broadcast(x, 0, row),
            "wait": handle.wait,
            "done": handle.done,
            "synchronize": nccl.synchronize,
        }
        with pytest.raises(NcclError, match=broken):
            notices[notice]()
        assert raw.ended == "aborted"
        for use in (lambda nccl=nccl, x=x: nccl.broadcast(x, 0, row), handle.wait, handle.done):
            with pytest.raises(NcclError, match=r"was aborted: NCCL failed .*NCCL_ERROR_REMOTE_ERROR"):
                use()
        nccl.free()  # nothing left to do
        nccl.synchronize()
        model.finish()


def test_a_call_that_fails_aborts(comm: Communicator, model: ModelRig) -> None:
    for operation in ("all_reduce", "all_to_all"):  # a call of its own, and a group
        nccl = connect(comm.mpi, model.index, model.binding, lane=model.lane)
        raw, x = model.binding.communicators[-1], model.array(8 * comm.size)
        raw.refuses = RuntimeError("NCCL_ERROR_INVALID_USAGE")
        call = {
            "all_reduce": lambda nccl=nccl, x=x: nccl.all_reduce(x, "sum", TABLE["float32"]),
            "all_to_all": lambda nccl=nccl, x=x: nccl.all_to_all(model.array(x.nbytes), x, None, TABLE["float32"]),
        }[operation]
        with pytest.raises(NcclError, match=f"{operation}.*INVALID_USAGE") as caught:
            call()
        assert caught.value.__cause__ is raw.refuses
        assert raw.ended == "aborted"
        assert model.binding.collected is None, "the group was ended"
    model.finish()


def test_a_device_that_is_stuck_or_faulty_is_no_endless_wait(comm: Communicator, model: ModelRig) -> None:
    nccl = connect(comm.mpi, model.index, model.binding, lane=model.lane, timeout_s=0.05)
    nccl.all_reduce(model.array(4), "sum", TABLE["float32"])
    model.binding.patience = 10**9
    with pytest.raises(NcclError, match=r"all_reduce\(1 x float32\): not ended after 0.05 s"):
        nccl.synchronize()
    assert model.binding.communicators[-1].ended == "aborted"
    model.finish()

    nccl = connect(comm.mpi, model.index, model.binding, lane=model.lane)
    model.binding.patience = 0
    nccl.all_reduce(model.array(4), "sum", TABLE["float32"])
    model.binding.fault = RuntimeError("cudaErrorIllegalAddress")
    with pytest.raises(NcclError, match="cudaErrorIllegalAddress"):
        nccl.synchronize()
    model.finish()


def test_communicators_of_a_device_share_its_stream_and_end_apart(comm: Communicator, model: ModelRig) -> None:
    a, b = (connect(comm.mpi, model.index, model.binding, lane=model.lane) for _ in range(2))
    assert len(model.binding.own) == 1, "two NCCL kernels at once may wait for each other's ranks for ever"
    x = model.array(4)
    model.write(x, np.ones(1, np.float32))
    for nccl in (a, b, a, b):
        nccl.all_reduce(x, "sum", TABLE["float32"])
    result = model.read(x, TABLE["float32"])
    handle = a.all_reduce(model.array(4), "sum", TABLE["float32"], async_op=True)
    a.free()
    a.free()
    assert [raw.ended for raw in model.binding.communicators] == ["destroyed", ""]
    assert handle is not None
    assert handle.done()
    handle.wait()
    with pytest.raises(NcclError, match="was freed"):
        a.all_reduce(x, "sum", TABLE["float32"])
    b.free()
    model.finish()
    assert result().tolist() == [float(comm.size**4)]


def test_events_are_used_again(comm: Communicator, model: ModelRig) -> None:
    nccl = connect(comm.mpi, model.index, model.binding, lane=model.lane)
    for _ in range(5):
        handles = [nccl.all_reduce(model.array(4), "sum", TABLE["int8"], async_op=True) for _ in range(3)]
        for handle in handles:
            handle.wait()  # type: ignore[union-attr]
        model.finish()
        assert len(model.binding.recorded) <= 7  # one marks the callers' work, three a round, those of the round before
    del handle, handles
    nccl.free()
    assert not model.binding.recorded, "all events are given back"


def test_connecting_fails_on_all_ranks_alike(
    comm: Communicator, model: ModelRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = comm.size - 1
    if comm.rank == last:
        model.binding.refuses = RuntimeError("NCCL_ERROR_SYSTEM_ERROR")
    with pytest.raises(NcclError, match=r"NCCL 2\.25\.1 cannot connect .*SYSTEM_ERROR"):
        connect(comm.mpi, model.index, model.binding, lane=model.lane)
    assert [raw.ended for raw in model.binding.communicators] == ["" if comm.rank == last else "aborted"]
    model.binding.refuses = None

    if comm.rank == last:

        def gpu(index: int) -> str:
            raise RuntimeError("cudaErrorInvalidDevice")

        monkeypatch.setattr(model.binding, "gpu", gpu)
    with pytest.raises(RuntimeError, match="cannot be used: cudaErrorInvalidDevice"):
        connect(comm.mpi, model.index, model.binding, lane=model.lane)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch, comm: Communicator, model: ModelRig) -> pytest.MonkeyPatch:
    """Ranks 0 and 1 have the same GPU, or slices of it."""
    gpu = bindings.Gpu("machine", f"0000:{max(comm.rank - 1, 0):02x}:00.0")
    monkeypatch.setattr(model.binding, "gpu", lambda index: gpu)
    monkeypatch.delenv(transport._SHARED_GPU_VARIABLE, raising=False)
    monkeypatch.delenv(transport._MAX_CTAS_VARIABLE, raising=False)
    return monkeypatch


def test_ranks_that_share_a_gpu_need_nccl_to_be_told(comm: Communicator, model: ModelRig, shared: Any) -> None:
    if comm.size == 1:
        pytest.skip("needs two ranks")
    for version, variable in ((23003, ""), (23003, "0"), (22907, "1")):  # too old, or not told
        shared.setattr(model.binding, "version", lambda version=version: version)
        shared.setenv(transport._SHARED_GPU_VARIABLE, variable)
        with pytest.raises(
            bindings.NcclUnavailableError,
            match=r"ranks 0, 1 share a GPU \(GPU 0000:00:00.0, or slices of it\); start one .*MULTI_RANK_GPU_ENABLE=1",
        ):
            connect(comm.mpi, model.index, model.binding, lane=model.lane)
    assert not model.binding.communicators

    shared.setattr(model.binding, "version", lambda: 23003)
    shared.setenv(transport._SHARED_GPU_VARIABLE, "1")
    connect(comm.mpi, model.index, model.binding, lane=model.lane).free()
    assert os.environ[transport._MAX_CTAS_VARIABLE] == "8", "kernels of both ranks find room"
    shared.setenv(transport._MAX_CTAS_VARIABLE, "2")
    connect(comm.mpi, model.index, model.binding, lane=model.lane).free()
    assert os.environ[transport._MAX_CTAS_VARIABLE] == "2", "the user's own"


def test_more_than_two_ranks_on_a_gpu(comm: Communicator, model: ModelRig, shared: Any) -> None:
    if comm.size < 3:
        pytest.skip("needs three ranks")
    shared.setattr(model.binding, "gpu", lambda index: bindings.Gpu("machine", "0000:81:00.0"))
    shared.setattr(model.binding, "version", lambda: 23003)
    shared.setenv(transport._SHARED_GPU_VARIABLE, "1")
    with pytest.raises(
        bindings.NcclUnavailableError, match=r"ranks 0, 1, 2(, 3)? share a GPU .* lets 2 ranks share a GPU"
    ):
        connect(comm.mpi, model.index, model.binding, lane=model.lane)


def test_gpus_of_two_machines_may_have_the_same_bus_id(comm: Communicator, model: ModelRig, shared: Any) -> None:
    shared.setattr(model.binding, "gpu", lambda index: bindings.Gpu(f"machine {comm.rank}", "0000:81:00.0"))
    connect(comm.mpi, model.index, model.binding, lane=model.lane).free()


def test_nccl_that_refuses_a_shared_gpu_all_the_same(comm: Communicator, model: ModelRig, shared: Any) -> None:
    """Where it could not connect GPUs of their own, the job has a fault to tell; here there is another way."""
    if comm.size == 1:
        pytest.skip("needs two ranks")
    shared.setattr(model.binding, "version", lambda: 23003)
    shared.setenv(transport._SHARED_GPU_VARIABLE, "1")
    if comm.rank == 1:
        model.binding.refuses = RuntimeError("NCCL_ERROR_INVALID_USAGE")
    with pytest.raises(bindings.NcclUnavailableError, match=r"cannot connect .*INVALID_USAGE"):
        connect(comm.mpi, model.index, model.binding, lane=model.lane)


def test_a_shared_gpu_on_which_nccl_connects_and_does_not_work(
    comm: Communicator, model: ModelRig, shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels of two ranks may not find room side by side, and wait for each other: all ranks go on without NCCL."""
    if comm.size == 1:
        pytest.skip("needs two ranks")
    shared.setattr(model.binding, "version", lambda: 23003)
    shared.setenv(transport._SHARED_GPU_VARIABLE, "1")
    monkeypatch.setattr(transport, "_TRIAL_S", 0.05)
    model.binding.patience = 10**9
    with pytest.raises(bindings.NcclUnavailableError, match=r"does not work on a shared GPU: .*not ended after 0.05 s"):
        connect(comm.mpi, model.index, model.binding, lane=model.lane)
    assert [raw.ended for raw in model.binding.communicators] == ["aborted"]
    model.finish()


def test_different_versions_of_nccl(comm: Communicator, model: ModelRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.binding, "version", lambda: 23100 + comm.rank)
    if comm.size > 1:
        with pytest.raises(bindings.NcclUnavailableError, match=r"different versions of NCCL: 2\.31\.0, 2\.31\.1"):
            connect(comm.mpi, model.index, model.binding, lane=model.lane)


def test_cupy_binding_says_what_is_missing(comm: Communicator) -> None:
    """Whatever this machine has: either NCCL is there, or one line says what is missing, on all ranks."""
    try:
        version = bindings.load().version()
    except bindings.NcclUnavailableError:
        version = 0
    if version == 0:
        with pytest.raises(bindings.NcclUnavailableError, match=r"NCCL cannot be used: CuPy (cannot|finds no) "):
            connect(comm.mpi, 0)
    else:
        assert version >= 20000


def test_model_and_cupy_have_the_same_face(comm: Communicator) -> None:
    """What the model stands for: needs CuPy and NCCL's library, but no device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy's, of a missing NCCL
        cupy = pytest.importorskip("cupy")
        if not cupy.cuda.nccl.available:
            pytest.skip("CuPy finds no NCCL library")
    binding = bindings.CuPyBinding(cupy)
    for name, value in CONSTANTS.items():
        assert binding.constant(name) == value, name
    assert {row.nccl for row in TABLE.values() if row.nccl} <= set(CONSTANTS)
    with pytest.raises(bindings.NcclUnavailableError, match="has no NCCL_NONE"):
        binding.constant("NCCL_NONE")
    pairs = (
        (bindings.Binding, binding, ModelBinding()),
        (
            bindings.RawCommunicator,
            cupy.cuda.nccl.NcclCommunicator,
            ModelCommunicator,
        ),
    )
    for interface, real, model in pairs:
        for name in [name for name in vars(interface) if not name.startswith("_")]:
            assert callable(getattr(real, name)), name
            assert callable(getattr(model, name)), name
