"""CUDA-aware MPI: what the library's answers mean, that a bare address goes through MPI, and that NCCL stands still meanwhile.

An address is an address: without a GPU the "device" arrays lie in host memory, where every MPI library takes them.
"""

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from device_model import ModelBinding, ModelTorchKernels, ModelTorchStreams

from collectives import Communicator
from collectives.arrays.devices import DeviceArray
from collectives.arrays.dtypes import TABLE, DType, effective_op
from collectives.processes import loaded_libraries
from collectives.transports.gpu import cuda
from collectives.transports.gpu.cuda import Support, ask
from collectives.transports.gpu.lane import Lane
from collectives.transports.gpu.nccl import connect

pytestmark = pytest.mark.ranks(3)

_synchronize = cuda._synchronize  # before any test has replaced it
INDEX = 5  # a device that nobody has: its lane is these tests' own


@pytest.fixture(autouse=True)
def synchronized(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The (device, stream) pairs waited for. Without a device they are only listed."""
    places: list[tuple[int, int]] = []
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(cuda, "_synchronize", lambda *place: places.append(place))
    return places


def device(array: np.ndarray, stream: int = 0) -> DeviceArray:
    return DeviceArray(array.ctypes.data, array.nbytes, INDEX, stream)


def library(**functions: Any) -> Callable[[str], Any]:
    """An MPI library with these C functions."""
    return functions.get


def open_mpi(answer: int) -> Any:
    return ctypes.CFUNCTYPE(ctypes.c_int)(lambda: answer)


def mpich(said: int, failed: int = 0) -> Any:
    def query(kind: int, out: Any) -> int:
        assert kind == 0, "MPIX_GPU_SUPPORT_CUDA"
        out[0] = said
        return failed

    return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int))(query)


GTL = ["/opt/cray/pe/lib64/libmpi_gtl_cuda.so.0"]


@pytest.mark.parametrize(
    ("find", "libraries", "environ", "aware", "why"),
    [
        (library(MPIX_Query_cuda_support=open_mpi(1)), [], {}, True, "MPIX_Query_cuda_support() = 1"),
        (library(MPIX_Query_cuda_support=open_mpi(0)), [], {}, False, "MPIX_Query_cuda_support() = 0"),
        (library(MPIX_GPU_query_support=mpich(1)), [], {}, True, "MPIX_GPU_query_support() = 1"),
        (library(MPIX_GPU_query_support=mpich(0)), [], {}, False, "MPIX_GPU_query_support() = 0"),
        (library(MPIX_GPU_query_support=mpich(1, failed=1)), [], {}, False, "MPIX_GPU_query_support() = 1"),
        (library(), GTL, {"MPICH_GPU_SUPPORT_ENABLED": "1"}, True, "libmpi_gtl_cuda is loaded"),
        (library(), [], {"MPICH_GPU_SUPPORT_ENABLED": "1"}, False, "gives no answer; set MPITRAIN_CUDA_AWARE=1"),
        (library(), GTL, {}, False, "gives no answer"),
        (
            library(MPIX_GPU_query_support=mpich(1)),
            GTL,
            {"MPICH_GPU_SUPPORT_ENABLED": "0"},
            False,
            "MPICH_GPU_SUPPORT_ENABLED=0",
        ),
        (
            library(MPIX_Query_cuda_support=open_mpi(0)),
            [],
            {"MPITRAIN_CUDA_AWARE": "1"},
            True,
            "MPITRAIN_CUDA_AWARE=1",
        ),
        (
            library(MPIX_Query_cuda_support=open_mpi(1)),
            [],
            {"MPITRAIN_CUDA_AWARE": "0"},
            False,
            "MPITRAIN_CUDA_AWARE=0",
        ),
    ],
)
def test_who_takes_device_addresses(
    find: Callable[[str], Any], libraries: list[str], environ: dict[str, str], aware: bool, why: str
) -> None:
    answer = ask(find, libraries, environ)
    assert answer.aware == aware
    assert why in answer.why


def test_a_wrong_override_is_an_error() -> None:
    with pytest.raises(ValueError, match="MPITRAIN_CUDA_AWARE is 'yes'; expected 0, 1 or auto"):
        ask(library(), [], {"MPITRAIN_CUDA_AWARE": "yes"})


def test_the_library_of_this_run_is_found_and_asked(comm: Communicator) -> None:
    """Open MPI's and MPICH's wheels both have the function; a library of a cluster may not."""
    from mpi4py import MPI

    paths = loaded_libraries("libmpi", "libmpich")
    assert any(os.path.basename(path).startswith("libmpi") for path in paths)
    answer = cuda.support()
    assert answer is cuda.support(), "asked once"
    if "MPITRAIN_CUDA_AWARE" not in os.environ and "Open MPI v5" in MPI.Get_library_version():
        assert answer.why.startswith("MPIX_Query_cuda_support() = ")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What was found out about messages is forgotten, before and after."""
    cuda.takes_messages.cache_clear()
    yield
    cuda.takes_messages.cache_clear()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("nccl", "library", "mpi", "answer"),
    [(False, True, True, True), (True, True, True, False), (False, False, True, False), (False, True, False, False)],
)
def test_messages_go_from_where_they_lie_only_where_nccl_never_comes(
    monkeypatch: pytest.MonkeyPatch, nccl: bool, library: bool, mpi: bool, answer: bool
) -> None:
    monkeypatch.setattr(cuda.binding, "is_available", lambda: nccl)
    monkeypatch.setattr(cuda, "kernels_of", lambda index: ModelTorchKernels(index) if library else None)
    monkeypatch.setattr(cuda, "support", lambda: Support(mpi, "as if"))
    assert cuda.takes_messages(INDEX) == answer


@pytest.fixture
def aware(monkeypatch: pytest.MonkeyPatch) -> Iterator[Support]:
    answer = Support(True, "as if")
    monkeypatch.setattr(cuda, "support", lambda: answer)
    return answer


def make(values: list[int]) -> tuple[np.ndarray, DeviceArray]:
    array = np.array(values, np.uint8)
    return array, device(array)


def test_all_ranks_agree(comm: Communicator, monkeypatch: pytest.MonkeyPatch, aware: Support) -> None:
    assert cuda.agree(comm.mpi, make) == aware
    refusal = cuda.agree(comm.mpi, None if comm.rank == comm.size - 1 else make)
    assert not refusal.aware
    assert refusal.why == "neither torch nor CuPy uses the GPU"
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(cuda, "support", lambda: Support(False, "not here"))
    assert cuda.agree(comm.mpi, make) == Support(False, "not here")


def test_bytes_that_do_not_arrive_are_noticed_on_all_ranks(comm: Communicator, aware: Support) -> None:
    def elsewhere(values: list[int]) -> tuple[np.ndarray, DeviceArray]:
        """What the last rank receives, it does not find where it looks: as where MPI wrote to a copy of its own."""
        array, where = make(values)
        if comm.rank == comm.size - 1:
            kept.append(array)
            array = array.copy()
        return array, where

    kept: list[np.ndarray] = []
    answer = cuda.agree(comm.mpi, elsewhere)
    assert not answer.aware
    sender = (comm.size - 2) % comm.size
    assert answer.why == f"as if, but a try failed: rank {comm.size - 1} received [0, 0] instead of [{sender}, 90]"


def test_addresses_go_through_mpi(comm: Communicator) -> None:
    from collectives.transports.mpi import Library

    library = Library(comm.mpi)

    n, rank = comm.size, comm.rank
    for row in TABLE.values():
        for size in (0, 1, 1031):
            whole = (np.arange(size * n) % 2).astype(row.numpy)
            x, out = whole.copy(), np.full(size * n, 0, row.numpy)
            part = slice(rank * size, (rank + 1) * size)
            out[part] = whole[part]
            with cuda.calling(device(x), device(out)):
                view = cuda.view(device(out), row)
                library.all_gather(view, view[part], [size] * n)
                library.broadcast(cuda.view(device(x), row), n - 1)
            assert out.tobytes() == x.tobytes() == whole.tobytes(), (row.name, size)
            for op in ("sum", "max"):
                if cuda.reduces(row, op):
                    raw = "max" if row.name == "bool" else op
                    with cuda.calling(device(x)):
                        library.all_reduce(cuda.view(device(x), row), raw, row)
                    expected = whole if raw == "max" else (whole * n).astype(row.numpy)
                    assert x.tobytes() == expected.tobytes(), (row.name, size, op)
                    x[...] = whole
    reducible = {row.name for row in TABLE.values() if cuda.reduces(row, "sum")}
    small = {"int8", "uint8", "int16", "uint16"}
    assert reducible == set(TABLE) - {"float16", "bfloat16"} - small, (
        "MPI has no halves, and some add small integers otherwise"
    )
    assert cuda.reduces(TABLE["float32"], "avg"), "a sum, which is divided by a kernel"
    assert not cuda.reduces(TABLE["float32"], "max"), "ours hands on NaN, and works in host memory"


def test_mpi_gets_a_device_address_only_with_an_operation_of_its_own() -> None:
    """One of ours is a function that MPI calls on the host, with the address: on a device the process would die of it."""
    from collectives.transports.mpi import _op

    for row in TABLE.values():
        for op in sorted(row.ops):
            raw = effective_op(row, op)
            if cuda.reduces(row, raw):
                assert _op(raw, np.dtype(np.uint8) if row.name == "bool" else row.numpy).is_predefined, (row.name, op)


def test_the_stream_of_an_array_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the default stream: `torch.cuda.ExternalStream(0)` is another one, where nothing ever is to be waited for."""
    model = ModelBinding(INDEX)
    monkeypatch.setattr(torch, "cuda", ModelTorchStreams(model))
    monkeypatch.setattr(cuda, "_synchronize", _synchronize)
    for stream in (0, 1, model.stream()):
        x = np.zeros(1, np.float32)
        model.write(0 if stream == 1 else stream, x.ctypes.data, np.ones(1, np.float32))
        cuda.wait_for(device(x, stream))
        assert x[0] == 1, f"stream {stream}"


def test_a_view_is_not_touched_by_the_host() -> None:
    """An address that no host memory lies at: making the view of it, and what MPI is told of it, must not look there."""
    from collectives.transports.mpi import message

    row: DType = TABLE["bfloat16"]
    view = cuda.view(DeviceArray(0x10, 1 << 20, INDEX, 0), row)
    buffer, count, _ = message(view)
    assert (view.dtype, view.size, buffer.ctypes.data, count) == (row.numpy, 1 << 19, 0x10, 1 << 19)


def test_nccl_stands_still_during_an_mpi_call(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, synchronized: list[tuple[int, int]]
) -> None:
    model, lane = ModelBinding(INDEX), Lane()
    monkeypatch.setattr(cuda, "lane_of", lambda index: {INDEX: lane}[index])
    nccl = connect(comm.mpi, INDEX, model, lane=lane)
    stream = model.stream()
    x = np.ones(4, np.float32)
    nccl.all_reduce(device(x, stream), "sum", TABLE["float32"])
    assert x[0] == 1, "only queued"
    with cuda.calling(device(x, stream), device(x, 7)):
        assert x[0] == comm.size, "NCCL's work has ended"
        assert synchronized == [(INDEX, 7), (INDEX, stream)]
        with pytest.raises(AssertionError, match="inside a CUDA-aware MPI call"):
            nccl.all_reduce(device(x, stream), "sum", TABLE["float32"])

        late = told_to_another_thread(lane)
        assert "another thread's MPI call on device memory has not ended" in late
    nccl.all_reduce(device(x, stream), "sum", TABLE["float32"])
    model.drain()
    assert x[0] == comm.size**2
    nccl.free()
    assert not lane._members
    model.communicators[0].mpi.Free()


def told_to_another_thread(lane: Lane) -> str:
    """What another thread is told that wants to start an NCCL operation now, and waits 50 ms for it."""
    said: list[str] = []

    def enter() -> None:
        try:
            with lane.nccl(0.05):
                said.append("entered")
        except TimeoutError as error:
            said.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(10)
    return said[0]


def test_info_says_what_there_is(comm: Communicator) -> None:
    lines = dict(cuda.info_lines())
    assert list(lines) == ["CUDA-aware MPI", "NCCL"]
    assert lines["CUDA-aware MPI"].startswith(("yes (", "no ("))
    assert lines["NCCL"].startswith("no: CuPy ") or lines["NCCL"][0].isdigit()


@pytest.mark.gpu
def test_device_memory_goes_through_mpi(comm: Communicator) -> None:
    index = comm.node.rank % torch.cuda.device_count()

    def on_gpu(values: list[int]) -> tuple[Any, DeviceArray]:
        x = torch.tensor(values, dtype=torch.uint8, device=f"cuda:{index}")
        return x, DeviceArray(x.data_ptr(), x.nbytes, index, torch.cuda.current_stream(index).cuda_stream)

    answer = cuda.agree(comm.mpi, on_gpu)
    if not answer.aware:
        pytest.skip(f"this MPI is not CUDA-aware: {answer.why}")
