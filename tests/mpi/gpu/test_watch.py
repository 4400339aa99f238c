"""The thread that watches what NCCL has on the device: what ends the job, what does not, and CUDA graphs, which it leaves alone."""

import gc
import sys
import threading
import time
import weakref

import pytest
from device_model import Graph
from gpu_rig import INDEX, Gpu

from collectives.diagnosis.hangs.notice import DeviceWork
from collectives.transports.gpu import watch
from collectives.transports.gpu.lane import Lane
from collectives.transports.gpu.nccl import connect
from collectives.transports.gpu.nccl_queue import NcclError

pytestmark = [pytest.mark.parametrize("gpu", ["nccl"], indirect=True), pytest.mark.ranks(2)]


class Clocked:
    """A watch, and a clock for it."""

    def __init__(self, gpu: Gpu) -> None:
        self.said: list[str] = []
        self.noted: DeviceWork | None = None
        self._watch, self._now = watch.Watch(self.said.append, self._note), 100.0
        self._nccl = gpu.comm._devices._nccl

    def _note(self, device: DeviceWork | None) -> None:
        self.noted = device

    def after(self, seconds: float, deadline_s: float = 60.0) -> bool:
        self._now += seconds
        return self._watch.look(self._nccl, self._now, deadline_s)


def test_a_kernel_that_waits_for_ever_ends_the_job(gpu: Gpu) -> None:
    gpu.comm.all_reduce(gpu.full(3, 1), algorithm="nccl")
    gpu.model.drain()
    clocked = Clocked(gpu)
    assert clocked.after(1000), "nothing is under way"
    assert clocked.noted is None
    gpu.model.patience = 10**9
    gpu.comm.all_reduce(gpu.full(3, 1), algorithm="nccl")
    assert clocked.after(1)
    assert clocked.after(59)
    assert clocked.after(1000, deadline_s=0), "no deadline"
    assert not clocked.said
    assert clocked.noted == ("NCCL's all_reduce(3 x float32)", 1101.0), "for a notice, since the first look"
    assert not clocked.after(1)
    assert len(clocked.said) == 1
    assert clocked.said[0].startswith(
        "NCCL's all_reduce(3 x float32) has not ended on the device 60 s after it was started"
    )


def test_a_busy_device_is_not_stuck(gpu: Gpu) -> None:
    gpu.comm.all_reduce(gpu.full(3, 1), algorithm="nccl")
    clocked = Clocked(gpu)
    for _ in range(5):
        gpu.comm.all_reduce(gpu.full(3, 1), algorithm="nccl")  # there is always one under way, but each time another
        gpu.model.patience = 1
        assert clocked.after(50)
        gpu.model.drain()
        gpu.comm.all_reduce(gpu.full(3, 1), algorithm="nccl")
        gpu.model.patience = 2
        assert clocked.after(50)
        gpu.model.patience = 0
        gpu.model.drain()
    assert not clocked.said


def test_an_error_that_the_program_does_not_notice_ends_the_job(gpu: Gpu) -> None:
    gpu.comm.all_reduce(gpu.full(3, 1), algorithm="nccl")
    gpu.model.drain()
    clocked = Clocked(gpu)
    gpu.model.communicators[-1].error = RuntimeError("NCCL_ERROR_REMOTE_ERROR")
    assert clocked.after(1)
    assert clocked.after(4)
    assert not clocked.said, "the program has its chance"
    assert not clocked.after(2)
    assert clocked.said == ["NCCL failed, and the program waits on: NCCL_ERROR_REMOTE_ERROR"]
    gpu.comm._devices._nccl.abort()  # as an operation does that notices it
    clocked.noted = DeviceWork("before", 0.0)
    assert not clocked.after(1), "over"
    assert clocked.noted is None


def test_errors_that_the_program_recovers_from_are_no_failure(gpu: Gpu) -> None:
    gpu.comm.all_reduce(gpu.full(3, 1), algorithm="nccl")
    gpu.model.drain()
    clocked, raw = Clocked(gpu), gpu.model.communicators[-1]
    for _ in range(3):
        raw.error = RuntimeError("NCCL_ERROR_IN_PROGRESS")
        assert clocked.after(1)
        raw.error = None
        assert clocked.after(5)
    assert not clocked.said


def test_the_watch_is_a_thread_that_ends_with_the_communicator(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the thread itself
    nccl = connect(gpu.comm.mpi, INDEX, gpu.model, lane=Lane())
    said: list[str] = []
    monkeypatch.setattr(watch, "_end_job", said.append)
    monkeypatch.setattr(watch, "_POLL_S", 0.01)
    monkeypatch.setattr(watch, "_GRACE_S", 0.02)
    gpu.model.communicators[-1].error = RuntimeError("NCCL_ERROR_REMOTE_ERROR")
    watch.over(nccl)
    until = time.monotonic() + 10
    while not said and time.monotonic() < until:
        time.sleep(0.01)
    assert said == ["NCCL failed, and the program waits on: NCCL_ERROR_REMOTE_ERROR"]
    nccl.abort()


# CUDA graphs: [Note: captures] in nccl_queue.py


def test_a_collective_in_a_captured_graph(gpu: Gpu) -> None:
    """It runs whenever the graph does; its event, of which CUDA tells nothing, is no failure, and later operations go on."""
    comm, n = gpu.comm, gpu.comm.size
    x, y = gpu.full(3, 1), gpu.full(3, 1)
    comm.all_reduce(x, algorithm="nccl")
    clocked = Clocked(gpu)
    gpu.model.drain()
    gpu.model.begin_capture(gpu.stream)
    comm.all_reduce(x, algorithm="nccl")
    work = comm.all_reduce(y, algorithm="nccl", async_op=True)
    with pytest.raises(RuntimeError, match=r"done\(\) of all_reduce.*captured in a CUDA graph"):
        work.done()
    work.wait()
    late = comm.all_reduce(y, algorithm="nccl", async_op=True)
    comm.all_reduce(y, algorithm="nccl")  # which brings NCCL's stream back to the caller's
    graph = gpu.model.end_capture()
    for _ in range(3):
        gpu.model.streams[gpu.stream].extend(graph)
        assert clocked.after(10)
    gpu.model.drain()
    assert gpu.read(x) == [n**4] * 3
    with pytest.raises(RuntimeError, match="comes after the end of the CUDA graph capture"):
        late.wait()
    assert clocked.after(100)
    assert gpu.read(comm.all_reduce(x, algorithm="nccl")) == [n**5] * 3
    assert clocked.after(100)
    assert not clocked.said


def test_arrays_of_a_captured_operation_live_until_the_capture_ends(gpu: Gpu) -> None:
    comm = gpu.comm
    comm.all_reduce(gpu.full(3, 1), algorithm="nccl")
    gpu.model.drain()
    x = gpu.full(3, 1)
    gpu.model.drain()
    seen = weakref.ref(x)
    gpu.model.begin_capture(gpu.stream)
    comm.all_reduce(x, algorithm="nccl", async_op=True)
    del x
    gc.collect()
    y = gpu.full(3, 1)
    comm.all_reduce(y, algorithm="nccl")
    gc.collect()
    assert seen() is not None
    gpu.model.end_capture()
    comm.all_reduce(y, algorithm="nccl")
    gc.collect()
    assert seen() is None


def test_a_question_during_a_capture_is_no_failure(gpu: Gpu) -> None:
    """About an operation from before, by this thread or by the one that watches."""
    comm = gpu.comm
    work = comm.all_reduce(gpu.full(3, 1), algorithm="nccl", async_op=True)
    clocked = Clocked(gpu)
    gpu.model.patience = 10
    gpu.model.begin_capture(gpu.stream)
    assert not work.done()
    assert clocked.after(1)
    comm.all_reduce(gpu.full(3, 1), algorithm="nccl")  # which looks whose arrays may go
    gpu.model.end_capture()
    gpu.model.patience = 0
    gpu.model.drain()
    assert work.done()
    assert clocked.after(1000)
    assert not clocked.said


def graph_of(gpu: Gpu) -> Graph:
    """With an operation of the communicator."""
    gpu.comm.all_reduce(gpu.full(3, 1), algorithm="nccl")
    gpu.model.begin_capture(gpu.stream)
    gpu.comm.all_reduce(gpu.full(3, 1), algorithm="nccl")
    return gpu.model.end_capture()


def test_a_communicator_that_a_graph_holds_is_left_to_the_end_of_the_process(gpu: Gpu) -> None:
    graph, raw = graph_of(gpu), gpu.model.communicators[-1]
    gpu.model.drain()  # its kernels know it too
    references = sys.getrefcount(raw)
    gpu.comm._devices._nccl.free()
    assert gpu.comm._devices._nccl.is_over
    assert not raw.ended, "NCCL would wait for the graph"
    assert sys.getrefcount(raw) == references + 1, "Python's end does not come to it"
    assert graph


def test_an_error_of_a_communicator_that_a_graph_holds_is_no_hang(gpu: Gpu) -> None:
    """NCCL's abort waits for the graph: in a thread that nobody waits for."""
    graph, raw = graph_of(gpu), gpu.model.communicators[-1]
    gpu.model.drain()
    begun, goes_on = threading.Event(), threading.Event()
    raw.abort = lambda: (begun.set(), goes_on.wait(60))
    raw.error = RuntimeError("NCCL_ERROR_REMOTE_ERROR")
    with pytest.raises(NcclError, match="NCCL_ERROR_REMOTE_ERROR"):
        gpu.comm.all_reduce(gpu.full(3, 1), algorithm="nccl")
    assert begun.wait(10)
    assert gpu.comm._devices._nccl.is_aborted
    goes_on.set()
    for thread in threading.enumerate():
        if thread.name == "collectives-nccl-abort":
            thread.join(10)
    assert graph
