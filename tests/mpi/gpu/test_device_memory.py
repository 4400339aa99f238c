"""What lives how long on a device, who waits for whom, and one rank alone: on a device whose pools give freed memory out again."""

import gc
import logging
import weakref
from typing import Any

import numpy as np
import pytest
from device_model import POISON, ModelBinding
from gpu_rig import Gpu, OnGpu

from collectives import Communicator
from collectives.arrays import devices
from collectives.transports.gpu import device
from collectives.transports.gpu.binding import Gpu as Seat
from collectives.transports.gpu.lane import Lane
from collectives.transports.gpu.nccl import connect

pytestmark = pytest.mark.ranks(2)

by_nccl = pytest.mark.parametrize("gpu", ["nccl"], indirect=True)


def test_the_model_gives_freed_memory_out_again_in_the_order_of_its_stream() -> None:
    model = ModelBinding()
    stream, other = model.stream(), model.stream()
    x = model.allocate(4, stream)
    address = x.ctypes.data
    view = x[1:3].view(np.uint8)
    del x
    gc.collect()
    assert model.allocate(4, stream).ctypes.data != address, "a view keeps it"
    del view
    gc.collect()
    assert model.allocate(4, other).ctypes.data != address, "another stream's pool"
    y = model.allocate(4, stream)
    assert y.ctypes.data == address
    assert y[0] != POISON, "the stream has not come to it"
    model.drain()
    assert y.tolist() == [POISON] * 4


@pytest.mark.rest
@pytest.mark.parametrize("nccl_first", [True, False])
def test_arrays_live_until_somebody_has_waited(gpu: Gpu, nccl_first: bool) -> None:
    """Source and result, also where nobody else holds them, and no longer."""
    comm, n, rank = gpu.comm, gpu.comm.size, gpu.comm.rank
    gpu.model.nccl_first = nccl_first
    comm.all_reduce(gpu.full(3, 1))
    out = gpu.full(4, 0)
    work = comm.reduce_scatter(out, gpu.full(4 * n, rank + 1), async_op=True)
    gathered = gpu.full(2 * n, -1)
    seen = weakref.ref(gathered)
    other = comm.all_gather(gathered, gpu.full(2, rank), async_op=True)
    del gathered
    gc.collect()
    for _ in range(3):
        gpu.full(4 * n, 99)  # takes the memory of the source, if that is free
    assert work.wait() is out
    assert gpu.read(out) == [sum(range(1, n + 1))] * 4
    assert gpu.read(other.wait()) == [r for r in range(n) for _ in range(2)]
    del other
    gc.collect()
    assert seen() is None


@pytest.mark.rest
@by_nccl
@pytest.mark.parametrize("nccl_first", [True, False])
def test_arrays_of_work_that_nobody_holds_live_until_it_has_ended(gpu: Gpu, nccl_first: bool) -> None:
    comm, n, rank = gpu.comm, gpu.comm.size, gpu.comm.rank
    gpu.model.nccl_first = nccl_first
    comm.all_reduce(gpu.full(3, 1), algorithm="nccl")
    gpu.model.drain()
    out, x = gpu.full(4, 0), gpu.full(4 * n, rank + 1)
    gpu.model.patience = 10**9  # nothing ends
    seen = weakref.ref(x)
    comm.reduce_scatter(out, x, algorithm="nccl", async_op=True)
    del x
    gc.collect()
    later = gpu.full(4 * n, 99)
    comm.all_reduce(later, algorithm="nccl")
    gc.collect()
    assert seen() is not None
    gpu.model.patience = 0
    gpu.model.drain()
    assert gpu.read(out) == [sum(range(1, n + 1))] * 4
    comm.all_reduce(later, algorithm="nccl")
    gc.collect()
    assert seen() is None, "the next operation looks"


@by_nccl
def test_the_watch_gives_arrays_up_too(gpu: Gpu) -> None:
    """Of the last operation, which no other follows."""
    x = gpu.full(4, 1)
    seen = weakref.ref(x)
    gpu.comm.all_reduce(x, algorithm="nccl", async_op=True)
    del x
    gpu.model.drain()
    gc.collect()
    assert seen() is not None
    gpu.comm._devices._nccl.look(None)
    gc.collect()
    assert seen() is None


@by_nccl
def test_arrays_of_aborted_operations_are_given_up_after_the_abort(gpu: Gpu) -> None:
    x = gpu.full(4, 1)
    seen, alive = weakref.ref(x), []
    gpu.comm.all_reduce(x, algorithm="nccl", async_op=True)
    del x
    nccl = gpu.comm._devices._nccl
    abort = nccl._raw.abort
    nccl._raw.abort = lambda: (alive.append(seen() is not None), abort())
    nccl.abort()
    gc.collect()
    assert alive == [True]
    assert seen() is None


def test_each_wait_orders_the_stream_that_is_current_then(gpu: Gpu) -> None:
    n, sides = gpu.comm.size, [gpu.model.stream() for _ in range(2)]
    gpu.model.nccl_first = False  # the other streams run ahead of it
    x = gpu.full(4, 1)
    work = gpu.comm.all_reduce(x, async_op=True)
    for side in sides:
        x.stream = side
        assert work.wait() is x
    seen: list[float] = []
    for side in sides:
        gpu.model.queue(side, lambda: seen.append(float(x.values[0])))
    gpu.model.drain()
    assert seen == [n, n]


def test_a_stream_that_nobody_made_wait_is_not_ordered(gpu: Gpu) -> None:
    """The test before this one can fail."""
    if gpu.way != "nccl" or gpu.comm.size == 1:
        pytest.skip("without NCCL the host waits; one rank alone changes nothing")
    gpu.model.nccl_first = False
    x, side = gpu.full(4, 1), gpu.model.stream()
    work = gpu.comm.all_reduce(x, async_op=True)
    seen: list[Any] = []
    gpu.model.queue(side, lambda: seen.extend(x.values.tolist()))
    gpu.model.drain()
    assert seen != [gpu.comm.size] * 4
    work.wait()


@pytest.mark.ranks(1)
def test_one_rank_alone_reduces_and_copies_nothing(gpu: Gpu) -> None:
    if gpu.comm.size > 1:
        pytest.skip("needs one rank")
    comm = gpu.comm
    for op in ("sum", "avg", "max"):
        x = gpu.full(5, 3)
        assert comm.all_reduce(x, op) is x
        assert comm.reduce(x, 0, op) is x
        assert comm.broadcast(x) is x
        assert gpu.read(x) == [3] * 5
    whole = gpu.full(4, 2)
    same = OnGpu(whole.values, gpu.stream)
    comm.all_gather(whole, same)
    comm.reduce_scatter(same, whole)
    assert gpu.staged == 0
    assert not gpu.model.communicators, "not even connected"
    side, late = gpu.model.stream(), gpu.model.stream()  # the first runs ahead of the second
    gpu.model.write(late, whole.values.ctypes.data, np.full(4, 5, np.float32))
    whole.stream = late
    work = comm.all_reduce(whole, async_op=True)
    whole.stream = side
    assert gpu.read(work.wait(), side) == [5] * 4, "after the kernel that has filled it"
    assert gpu.staged == 0
    assert not gpu.nccl_calls()
    assert gpu.read(comm.all_gather(gpu.full(2, 0), gpu.full(2, 7))) == [7] * 2, "what is somewhere else is copied"


def test_a_message_of_several_host_arrays_in_a_group(gpu: Gpu) -> None:
    """Their copies on the device are of one size: freed too early, the second would take the memory of the first."""
    comm, n, rank = gpu.comm, gpu.comm.size, gpu.comm.rank
    if n == 1:
        pytest.skip("needs two ranks")
    comm.all_reduce(gpu.full(3, 1))
    received = [np.zeros(3) for _ in range(3)]
    with comm.group():
        for i, x in enumerate(received):
            comm.send(np.full(3, 10.0 * rank + i), (rank + 1) % n)
            comm.recv(x, (rank - 1) % n)
    assert [x.tolist() for x in received] == [[10.0 * ((rank - 1) % n) + i] * 3 for i in range(3)]


def test_ranks_that_share_a_gpu_go_on_without_nccl(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Through the host, and one message says so, for all communicators."""
    if comm.size == 1:
        pytest.skip("needs two ranks")
    rig = Gpu(comm, "host", monkeypatch)
    monkeypatch.setattr(rig.model, "gpu", lambda index: Seat("machine", f"0000:{comm.rank // 2:02x}:00.0"))
    monkeypatch.setattr(device, "connect", lambda mpi, index: connect(mpi, index, rig.model, lane=Lane()))
    monkeypatch.setattr(devices, "_said", set())
    with caplog.at_level(logging.INFO, "collectives"):
        x = rig.full(3, comm.rank + 1)
        assert rig.read(rig.comm.all_reduce(x)) == [sum(range(1, comm.size + 1))] * 3
        pair = rig.comm.split(comm.rank // 2)
        assert rig.read(pair.all_reduce(rig.full(3, 1))) == [pair.size] * 3
    said = [record for record in caplog.records if "no NCCL" in record.message]
    assert len(said) == 1, [record.message for record in said]
    assert said[0].levelno == (logging.WARNING if comm.rank == 0 else logging.INFO)
    assert "ranks 0, 1 share a GPU (GPU 0000:00:00.0, or slices of it)" in said[0].message
    assert not rig.model.communicators
    pair.free()
    rig.close()
