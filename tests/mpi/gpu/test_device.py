"""The Communicator's operations on arrays in GPU memory: by NCCL, by CUDA-aware MPI, or through the host, whichever there is.

Without a GPU the arrays lie in host memory and say that they do not; NCCL and the streams are those of device_model.py.
"""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from closed_forms import inputs, reduced
from gpu_rig import INDEX, Gpu, OnGpu
from pretended_hosts import on_hosts

from collectives import Communicator, Work
from collectives.arrays import devices
from collectives.arrays.dtypes import TABLE
from collectives.progress.deferred import Deferred
from collectives.schedules import BUILDERS

pytestmark = pytest.mark.ranks(3)


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
    assert gpu.read(comm.all_gather(gpu.full(2 * n, -1), gpu.full(2, rank))) == [r for r in range(n) for _ in range(2)]
    whole = gpu.full(2 * n, rank)
    mine = OnGpu(whole.values[2 * rank : 2 * rank + 2], gpu.stream)
    assert gpu.read(comm.all_gather(whole, mine)) == [r for r in range(n) for _ in range(2)], "in place"
    out = gpu.full(n, -1) if rank == 0 else None
    assert comm.gather(out, gpu.full(1, rank)) is out
    assert out is None or gpu.read(out) == list(range(n))
    whole_or_none = gpu.array(np.arange(n, dtype=np.float32)) if rank == 0 else None
    assert gpu.read(comm.scatter(gpu.full(1, -1), whole_or_none)) == [rank]
    assert gpu.read(comm.all_to_all(gpu.full(n, -1), gpu.full(n, rank))) == list(range(n))


def test_calls_again_on_the_same_arrays(gpu: Gpu) -> None:
    """A call moves what lies in the arrays now, not a copy of an earlier call."""
    comm, n, rank = gpu.comm, gpu.comm.size, gpu.comm.rank
    x, out, whole = gpu.full(3, 0), gpu.full(2, 0), gpu.full(2 * n, 0)
    for value in (1, 2, 3):
        everywhere = value * sum(range(1, n + 1))

        def fill(array: OnGpu, number: float) -> OnGpu:
            gpu.model.write(gpu.stream, array.values.ctypes.data, np.full_like(array.values, number))
            return array

        assert gpu.read(comm.all_reduce(fill(x, value * (rank + 1)))) == [everywhere] * 3
        assert gpu.read(comm.broadcast(fill(x, value * (rank + 1)))) == [value] * 3
        assert gpu.read(comm.reduce_scatter(out, fill(whole, value * (rank + 1)))) == [everywhere] * 2
        assert gpu.read(comm.all_gather(whole, fill(out, value * rank))) == [value * r for r in range(n) for _ in "ab"]


def test_every_reduction(gpu: Gpu) -> None:
    """An average is divided once, halves are added in fp32: the bits of the closed forms, by each way."""
    comm, n, rank = gpu.comm, gpu.comm.size, gpu.comm.rank
    for row in TABLE.values():
        for op in sorted(row.ops):
            for size in (0, 3, 20_000):
                case = row.name, op, size
                mine, total = inputs(op, row, size, rank), reduced(op, row, size, n)
                x = comm.all_reduce(gpu.array(mine), op)
                y = comm.reduce(gpu.array(mine), n - 1, op)
                gpu.model.drain()
                assert x.values.tobytes() == total.tobytes(), case
                assert y.values.tobytes() == (total if rank == n - 1 else mine).tobytes(), case
                parts, whole = inputs(op, row, size * n, rank), reduced(op, row, size * n, n)
                part = slice(rank * size, (rank + 1) * size)
                for in_place in (False, True):
                    z = gpu.array(parts)
                    out = OnGpu(z.values[part], gpu.stream) if in_place else gpu.full(size, 0, row.numpy)
                    comm.reduce_scatter(out, z, op)
                    gpu.model.drain()
                    assert out.values.tobytes() == whole[part].tobytes(), (case, in_place)
                    assert in_place or z.values.tobytes() == parts.tobytes(), "x is left as it is"
    if gpu.way == "mpi, cupy" or gpu.way == "nccl":
        assert (gpu.staged > 0) == (gpu.way == "nccl"), "NCCL has no 16-bit integers"


def test_not_a_number_is_handed_on(gpu: Gpu) -> None:
    for dtype in (np.float32, ml_dtypes.bfloat16):
        x = gpu.array([np.nan if gpu.comm.rank == 0 else 1.0, 2.0], dtype)
        if gpu.way != "nccl":  # the model of NCCL is no proof of NCCL
            assert str(gpu.read(gpu.comm.all_reduce(x, "max"))) == "[nan, 2.0]"


@pytest.mark.parametrize("operation", BUILDERS)
def test_every_schedule(gpu: Gpu, operation: str) -> None:
    """On the device where MPI takes its addresses, without a copy on the host; else through it."""
    comm, n, rank, size = gpu.comm, gpu.comm.size, gpu.comm.rank, 300_000
    row = TABLE["bfloat16"]
    whole = inputs("sum", row, size * n, 1)
    part, root = slice(rank * size, (rank + 1) * size), n - 1
    at_root = rank == root
    for name in BUILDERS[operation]:
        if name == "two_level":
            continue
        x = expected = None
        match operation:
            case "all_reduce":
                x, expected = gpu.array(inputs("avg", row, size, rank)), reduced("avg", row, size, n)
                comm.all_reduce(x, "avg", algorithm=name)
            case "reduce":
                x, expected = gpu.array(inputs("max", row, size, rank)), reduced("max", row, size, n)
                comm.reduce(x, root, "max", algorithm=name)
                expected = expected if at_root else inputs("max", row, size, rank)
            case "reduce_scatter":
                x, expected = gpu.full(size, 0, row.numpy), reduced("avg", row, size * n, n)[part]
                comm.reduce_scatter(x, gpu.array(inputs("avg", row, size * n, rank)), "avg", algorithm=name)
            case "all_gather":
                x, expected = gpu.full(size * n, 0, row.numpy), whole
                comm.all_gather(x, gpu.array(whole[part]), algorithm=name)
            case "broadcast":
                x, expected = gpu.array(inputs("sum", row, size, rank)), inputs("sum", row, size, root)
                comm.broadcast(x, root, algorithm=name)
            case "gather":
                x, expected = (gpu.full(size * n, 0, row.numpy), whole) if at_root else (None, None)
                comm.gather(x, gpu.array(whole[part]), root, algorithm=name)
            case "scatter":
                x, expected = gpu.full(size, 0, row.numpy), whole[part]
                comm.scatter(x, gpu.array(whole) if at_root else None, root, algorithm=name)
            case "all_to_all":
                x = gpu.full(size * n, 0, row.numpy)
                expected = np.concatenate([inputs("sum", row, size * n, r)[part] for r in range(n)])
                comm.all_to_all(x, gpu.array(inputs("sum", row, size * n, rank)), algorithm=name)
        gpu.model.drain()
        if x is not None and expected is not None:
            assert x.values.tobytes() == expected.tobytes(), name
    is_there = n == 1 and operation in ("all_reduce", "reduce", "broadcast")  # one rank alone has the result
    assert (gpu.staged == 0) == (gpu.by_mpi or is_there)
    assert not gpu.nccl_calls()


def test_what_goes_through_the_host(gpu: Gpu) -> None:
    comm = gpu.comm
    comm.all_reduce(gpu.full(4, 1))
    comm.all_gather(gpu.full(4 * comm.size, 0), gpu.full(4, 1))
    assert (gpu.staged > 0) == (gpu.way == "host")
    before = gpu.staged
    assert gpu.read(comm.all_reduce(gpu.full(4, 1), algorithm="shared" if comm.num_nodes == 1 else "two_level"))[0] > 0
    assert gpu.staged == before + 1, "ranks read each other's memory on the host"
    assert gpu.read(comm.all_reduce(gpu.full(4, 1, np.float16), accumulate="fp32")) == [comm.size] * 4
    assert gpu.staged == before + 2, "which sends fp32"


def test_a_root_that_mixes_memories(gpu: Gpu) -> None:
    """The others cannot know of it: an error where they go by the device, or it works."""
    comm, n, rank = gpu.comm, gpu.comm.size, gpu.comm.rank
    out = np.zeros(n, np.float32) if rank == 0 else None
    if gpu.way == "host":
        comm.gather(out, gpu.full(1, rank))
        assert out is None or out.tolist() == list(range(n))
    elif n == 1:
        with pytest.raises(ValueError, match="gather: one of x and out is in GPU memory, the other in host memory"):
            comm.gather(out, gpu.full(1, rank))
    parts = gpu.full(n, 0) if rank == 0 else None
    comm.gather(parts, np.full(1, rank, np.float32))  # all go by the host: the part says so
    assert parts is None or gpu.read(parts) == list(range(n))


def test_one_device_on_each_rank(gpu: Gpu) -> None:
    gpu.comm.all_reduce(gpu.full(3, 1))
    x = gpu.full(3, 1)
    x.device = SimpleNamespace(id=INDEX + 1)
    with pytest.raises(
        ValueError, match=f"all_reduce: an array is on device {INDEX + 1}, but .* on device {INDEX}; use"
    ):
        gpu.comm.all_reduce(x)


def test_it_comes_after_what_was_issued_before(gpu: Gpu) -> None:
    """Without a progress thread: an operation on host arrays that waits to be carried out, and now one on the device."""
    comm = gpu.comm
    assert isinstance(comm._queue.progress, Deferred)
    comm.all_reduce(gpu.full(3, 1))
    x = np.ones(3)
    work = comm.all_reduce(x, async_op=True)
    while comm.rank % 2 and not work.done():  # carries it out as soon as all have issued it, and waits for them in it
        pass
    assert gpu.read(comm.all_reduce(gpu.full(3, 1), "max")) == [1] * 3
    assert work.wait().tolist() == [comm.size] * 3


def test_a_group_of_collectives(gpu: Gpu) -> None:
    xs = [gpu.full(3, value) for value in (1, 2)]
    with gpu.comm.group():
        for x in xs:
            gpu.comm.all_reduce(x)
    assert [gpu.read(x) for x in xs] == [[gpu.comm.size] * 3, [2 * gpu.comm.size] * 3]
    assert gpu.staged == (2 if gpu.way == "host" and gpu.comm.size > 1 else 0), "not packed on the host"


def test_a_communicator_that_was_freed(gpu: Gpu) -> None:
    other = gpu.comm.split(0)
    other.free()
    with pytest.raises(ValueError, match="this communicator was freed"):
        other.all_reduce(gpu.full(3, 1))


# Messages [Note: messages]

Make = Callable[[Any], Any]


def kinds(gpu: Gpu) -> list[tuple[Make, Make]]:
    """How the sender's array is made and the receiver's: on the device, on the host, and mixed."""
    return [(one, other) for one in (gpu.array, np.array) for other in (gpu.array, np.array)]


def values_of(gpu: Gpu, x: Any) -> list[Any]:
    return gpu.read(x) if isinstance(x, OnGpu) else x.tolist()


def test_messages(gpu: Gpu) -> None:
    """Outside a group by MPI, whatever the two arrays are, also once NCCL has connected the GPUs."""
    comm, n, rank = gpu.comm, gpu.comm.size, gpu.comm.rank
    if n == 1:
        pytest.skip("needs two ranks")
    for connected in (False, True):
        if connected:
            comm.all_reduce(gpu.full(3, 1))
            gpu.model.drain()
        calls = gpu.nccl_calls()
        for make, make_other in kinds(gpu):
            for tag in (0, 3):
                x, y = make([1.5 * rank, 2.0, 3.0]), make_other([0.0] * 3)
                previous, following = (rank - 1) % n, (rank + 1) % n
                sent = comm.isend(x, following, tag)  # all at once: with NCCL they would wait for each other
                assert comm.recv(y, previous, tag) is y
                sent.wait()
                assert values_of(gpu, y) == [1.5 * previous, 2.0, 3.0]
                received = comm.irecv(z := make_other([0.0] * 3), previous, tag)
                if rank % 2:
                    comm.send(x, following, tag)
                    assert received.wait() is z
                else:
                    comm.isend(x, following, tag).wait()
                    received.wait()
                assert values_of(gpu, z) == [1.5 * previous, 2.0, 3.0]
        assert gpu.nccl_calls() == calls
    assert (gpu.staged > 0) == (not gpu.by_mpi)
    if gpu.by_mpi:
        assert gpu.num_waits > 0, "MPI reads what the kernels in the stream have written"


def test_a_message_of_another_size(gpu: Gpu) -> None:
    comm = gpu.comm
    if comm.rank == 0 and comm.size > 1:
        comm.send(gpu.full(3, 1), 1)
        comm.isend(gpu.full(3, 1), 1).wait()
    elif comm.rank == 1:
        with pytest.raises(ValueError, match="recv: rank 0 sent 12 bytes, but x has 16"):
            comm.recv(gpu.full(4, 1), 0)
        with pytest.raises(ValueError, match="irecv: rank 0 sent 12 bytes, but x has 16"):
            comm.irecv(gpu.full(4, 1), 0).wait()


def test_messages_in_a_group(gpu: Gpu) -> None:
    """Round the ring, twice each way, between arrays of all kinds, of tag 0 and of others, with a collective."""
    comm, n, rank = gpu.comm, gpu.comm.size, gpu.comm.rank
    if n == 1:
        pytest.skip("needs two ranks")
    previous, following = (rank - 1) % n, (rank + 1) % n
    for connected in (False, True):
        if connected:
            comm.all_reduce(gpu.full(3, 1))
            gpu.model.drain()
        for make, make_other in kinds(gpu):
            before = gpu.nccl_calls()
            received = [make_other([0.0] * 3) for _ in range(3)]
            total = gpu.full(2, 1) if connected else np.ones(2)
            with comm.group():
                for i, tag in enumerate((0, 0, 7)):
                    comm.send(make([1.5 * rank, float(i), 3.0]), following, tag)
                    assert comm.recv(received[i], previous, tag) is received[i]
                comm.all_reduce(total)
            for i, x in enumerate(received):
                assert values_of(gpu, x) == [1.5 * previous, float(i), 3.0]
            assert values_of(gpu, total) == [n] * 2
            new = gpu.nccl_calls()[len(before) :]
            by_nccl = connected and gpu.way == "nccl"
            assert sorted(new) == (["allReduce", "recv", "recv", "send", "send"] if by_nccl else [])


def test_a_message_is_passed_on_round_the_ring(gpu: Gpu) -> None:
    """Each rank reads what it has received before it sends: a group must start without knowing whether the others have come."""
    comm, n, rank = gpu.comm, gpu.comm.size, gpu.comm.rank
    if n == 1:
        pytest.skip("needs two ranks")
    comm.all_reduce(gpu.full(3, 1))
    gpu.model.drain()
    for make, make_other in kinds(gpu):
        y = make_other([0.0])
        if rank == 0:
            with comm.group():
                comm.send(make([1.0]), 1)
                comm.recv(y, n - 1)
            assert values_of(gpu, y) == [n]
        else:
            with comm.group():
                comm.recv(y, rank - 1)
            (value,) = values_of(gpu, y)
            with comm.group():
                comm.send(make([value + 1]), (rank + 1) % n)
        gpu.model.drain()


def send_both(comm: Communicator, x: Any, y: Any) -> None:
    with comm.group():
        comm.send(x, (comm.rank + 1) % comm.size)
        comm.send(y, (comm.rank + 1) % comm.size)


def test_a_group_that_fails_starts_nothing(gpu: Gpu) -> None:
    comm = gpu.comm
    if comm.size == 1:
        pytest.skip("needs two ranks")
    comm.all_reduce(gpu.full(3, 1))
    x = gpu.full(3, 1)
    elsewhere = gpu.full(3, 1)
    elsewhere.device = SimpleNamespace(id=INDEX + 1)
    if gpu.way == "nccl":
        before = gpu.nccl_calls()
        with pytest.raises(ValueError, match=f"an array is on device {INDEX + 1}"):
            send_both(comm, x, elsewhere)
        assert gpu.nccl_calls() == before


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


def test_a_wire_format_without_effect_is_told_once(
    gpu: Gpu, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_said", set())
    hosts = on_hosts(gpu.comm.mpi, range(gpu.comm.size))
    with caplog.at_level(logging.INFO, "collectives"):
        for _ in range(2):
            gpu.read(hosts.all_reduce(gpu.full(300, 1)))
            gpu.read(hosts.with_wire({"network": "int8"}).all_reduce(gpu.full(300, 1)))
    line = "arrays in GPU memory are sent between nodes as they are, not in int8: {} moves them"
    expected = [] if gpu.way == "host" else [line.format("NCCL" if gpu.way == "nccl" else "CUDA-aware MPI")]
    assert [record.message for record in caplog.records if "int8" in record.message] == expected
    hosts.free()


def test_in_a_group_and_wrong_arguments_of_later_calls(gpu: Gpu) -> None:
    comm, n, rank = gpu.comm, gpu.comm.size, gpu.comm.rank
    x, y, parts = gpu.full(4, rank + 1), gpu.full(3, rank + 1), gpu.full(2 * n, -1)
    with comm.group():
        assert comm.all_reduce(x) is x
        comm.all_reduce(y)
        comm.all_gather(parts, gpu.full(2, rank))
        with pytest.raises(ValueError, match="algorithm 'magic' is unknown"):
            comm.all_reduce(y, algorithm="magic")
    assert gpu.read(x) == [sum(range(1, n + 1))] * 4
    assert gpu.read(y) == [sum(range(1, n + 1))] * 3
    assert gpu.read(parts) == [r for r in range(n) for _ in range(2)]
    assert (gpu.staged > 0) == (gpu.way == "host")
    with pytest.raises(ValueError, match="algorithm 'magic' is unknown"):
        comm.all_reduce(x, algorithm="magic", async_op=True)
    out = gpu.full(n, -1) if rank == 0 else None
    work = comm.gather(
        out, gpu.full(1, rank), async_op=True
    )  # by the same way on all ranks, though one alone has `out`
    assert work.wait() is out
    gpu.model.drain()  # what it took part in, on all ranks
    assert out is None or gpu.read(out) == list(range(n))


@pytest.mark.gpu
def test_torch_tensors_on_gpus(comm: Communicator) -> None:
    """By whichever way there is here."""
    import torch

    n, rank, own = comm.size, comm.rank, Communicator(comm.mpi.Dup())
    where = f"cuda:{comm.node.rank % torch.cuda.device_count()}"
    for row in TABLE.values():
        for op in sorted(row.ops):
            mine, total = inputs(op, row, 1031, rank), reduced(op, row, 1031, n)
            x = torch.from_numpy(mine.astype(np.float64)).to(where).to(getattr(torch, row.name))
            fresh = x.clone()
            for _ in range(3):  # on the same array
                assert own.all_reduce(x.copy_(fresh), op) is x
                assert (x.double().cpu().numpy() == total.astype(np.float64)).all(), (row.name, op)
    if n > 1:
        y = torch.zeros(3, device=where)
        with own.group():
            own.send(torch.full((3,), float(rank), device=where), (rank + 1) % n)
            own.recv(y, (rank - 1) % n)
        assert y.tolist() == [(rank - 1) % n] * 3
        sent = own.isend(torch.full((3,), float(rank), device=where), (rank + 1) % n)
        assert own.recv(np.zeros(3, np.float32), (rank - 1) % n).tolist() == [(rank - 1) % n] * 3
        sent.wait()
    own.free()
