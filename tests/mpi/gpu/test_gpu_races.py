"""Races on a real GPU, each made certain by a kernel that sleeps: whoever does not wait for it is too early, every time.

On one rank, too: NCCL copies on a stream of its own there, which is enough to lose a race.
"""

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import mpitrain
from collectives import Communicator
from collectives.arrays.devices import DeviceArray
from collectives.transports.gpu import cuda
from collectives.transports.gpu.lane import lane_of

pytestmark = pytest.mark.gpu

SLEEP = 200_000_000  # cycles: a tenth of a second
SIZE = 1 << 22  # elements


class Rig:
    """A communicator that NCCL has connected, and kernels that sleep."""

    def __init__(self, comm: Communicator) -> None:
        self.device = torch.device("cuda", comm.node.rank % torch.cuda.device_count())
        torch.cuda.set_device(self.device)
        self.comm = Communicator(comm.mpi.Dup())
        self.comm.all_reduce(self.full(1, 4), "avg", algorithm="auto" if comm.size > 1 else "nccl")
        torch.cuda.synchronize()

    def full(self, value: float, size: int = SIZE) -> torch.Tensor:
        return torch.full((size,), float(value), device=self.device)

    @contextmanager
    def _on_nccl(self) -> Iterator[None]:
        stream = lane_of(self.device.index)._stream
        assert stream is not None
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=self.device)):
            yield

    def let_nccl_sleep(self, times: int = 1) -> None:
        """What is queued on NCCL's stream from now on begins later."""
        with self._on_nccl():
            for _ in range(times):
                torch.cuda._sleep(SLEEP)


@pytest.fixture
def rig(comm: Communicator) -> Iterator[Rig]:
    try:
        rig = Rig(comm)
    except ValueError as error:  # on all ranks
        pytest.skip(f"no NCCL: {error}")
    if not rig.comm._devices.by_nccl:
        rig.comm.free()
        pytest.skip(f"no NCCL: {rig.comm._devices._why_not}")
    torch.cuda.synchronize()
    yield rig
    torch.cuda.synchronize()
    rig.comm.free()


def test_the_source_of_an_asynchronous_operation_lives(rig: Rig) -> None:
    """As a gradient buffer, which is dropped when its reduction has begun."""
    n = rig.comm.size
    out, x = rig.full(0), rig.full(3, SIZE * n)
    rig.let_nccl_sleep()
    work = rig.comm.reduce_scatter(out, x, async_op=True)
    del x
    y = rig.full(7, SIZE * n)  # takes its memory, if that is free
    work.wait()
    assert out.unique().tolist() == [3.0 * n]
    assert y[0] == 7


def test_memory_of_work_that_nobody_holds_is_not_given_out(rig: Rig) -> None:
    x = rig.full(3)
    where = x.data_ptr()
    rig.let_nccl_sleep()
    rig.comm.all_reduce(x, algorithm="nccl", async_op=True)
    del x
    y = rig.full(7)
    assert y.data_ptr() != where
    torch.cuda.synchronize()
    assert y.unique().tolist() == [7.0]


def test_wait_orders_the_stream_that_is_current_then(rig: Rig) -> None:
    x, side = rig.full(3), torch.cuda.Stream()
    host = torch.zeros(SIZE, pin_memory=True)
    rig.let_nccl_sleep()
    work = rig.comm.all_reduce(x.fill_(5), algorithm="nccl", async_op=True)
    with torch.cuda.stream(side):
        work.wait()
        host.copy_(x, non_blocking=True)
    side.synchronize()
    assert work.done(), "the copy came too early"
    assert host.unique().tolist() == [5.0 * rig.comm.size]


def test_gradients_that_leave_the_gpu_are_complete(rig: Rig) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(3))).to(rig.device)
    plain = copy.deepcopy(model)
    mpitrain.fully_shard(model, rig.comm, offload_policy=mpitrain.CPUOffloadPolicy())
    x = torch.randn(64, 1024, device=rig.device, generator=torch.Generator(rig.device).manual_seed(1))

    def late(grad: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(SLEEP)  # the device is behind the host
        return grad

    for _ in range(3):
        for each in (model, plain):
            each.zero_grad()
            y = each(x)
            y.register_hook(late)
            y.square().mean().backward()
        now = [param.grad.clone() for param in model.parameters()]
        torch.cuda.synchronize()
        for shard, grad, param in zip(model.parameters(), now, plain.parameters(), strict=True):
            assert param.grad is not None
            expected = mpitrain.sharding.unit.layout.rows_of(param.grad, shard.shard_box).cpu()  # type: ignore[attr-defined]
            torch.testing.assert_close(grad, expected, rtol=1e-3, atol=1e-6)


def test_the_default_stream_is_waited_for(rig: Rig) -> None:
    """Before MPI reads device memory."""
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            x = torch.zeros(4, device=rig.device)
            torch.cuda._sleep(SLEEP)
            x.fill_(1)
            cuda.wait_for(DeviceArray(x.data_ptr(), x.nbytes, rig.device.index, stream.cuda_stream))
            assert stream.query(), "MPI would read before the kernels have ended"


def test_host_and_device_arrays_side_by_side(rig: Rig) -> None:
    x, y = rig.full(1, 1 << 20), np.ones(1 << 20)
    for _ in range(10):
        work = rig.comm.all_reduce(x, "avg", async_op=True)
        rig.comm.all_reduce(y, "max")
        work.wait()
        x += 1
    assert x.unique().tolist() == [11.0]
    assert y.max() == y.min() == 1


def captured(run: Any, mode: str) -> torch.cuda.CUDAGraph:
    """What `run` does, as a CUDA graph."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # torch.cuda.graph() would wait for the whole device first
        graph.capture_begin(capture_error_mode=mode)
        run()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def test_a_graph_is_captured_while_nccl_is_watched(rig: Rig) -> None:
    x, y = rig.full(1, 1 << 20), rig.full(1, 1 << 20)
    for _ in range(3):
        y.mul_(1)  # what a first call loads is not to be captured
    torch.cuda.synchronize()
    rig.let_nccl_sleep(30)
    rig.comm.all_reduce(x, algorithm="nccl", async_op=True)

    def run() -> None:
        y.mul_(2)
        time.sleep(1.5)  # the watch looks every half second

    graph = captured(run, "global")
    graph.replay()
    torch.cuda.synchronize()
    assert y.unique().tolist() == [2.0]


def test_a_collective_in_a_captured_graph(rig: Rig) -> None:
    x, n = rig.full(1, 1 << 20), rig.comm.size

    def run() -> None:
        rig.comm.all_reduce(x, algorithm="nccl")
        x.add_(1)

    run()
    graph = captured(run, "thread_local")
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    time.sleep(1.2)  # the watch looks: at an event of the graph it would see an error
    expected = 1.0
    for _ in range(4):
        expected = expected * n + 1
    assert x.unique().tolist() == [expected]
    assert rig.comm.all_reduce(x, algorithm="nccl").unique().tolist() == [expected * n]
