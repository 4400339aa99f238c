"""Reduce-scatters in node memory that ranks post and go on from: no rank waits for another before it must."""

import time
from typing import Any

import numpy as np
import pytest
import torch

from collectives import Communicator, Mesh, Work
from collectives.progress.deferred import Deferred
from collectives.progress.issued import Posted
from collectives.progress.on_thread import Thread

pytestmark = pytest.mark.one_node


@pytest.fixture(scope="module")
def deferring(comm: Communicator) -> Communicator:
    return Communicator(comm.mpi.Dup(), progress=Deferred())


def is_posted(work: Any) -> bool:
    return isinstance(work.announced, Posted)


def test_two_buffers_in_turn_with_ranks_that_are_slow_at_random(deferring: Communicator) -> None:
    comm, random = deferring, np.random.default_rng(deferring.rank)
    for dtype in (torch.float32, torch.bfloat16):
        arrays = [comm.node.empty(1003 * comm.size, dtype) for _ in range(2)]
        outs = [torch.empty(1003, dtype=dtype) for _ in range(2)]
        works: list[Work | None] = [None, None]
        for k in range(300):
            this, work = k % 2, works[k % 2]
            if work is not None:
                assert work.wait() is outs[this]
                wanted = sum((k - 2) % 50 + rank for rank in range(comm.size)) / comm.size
                assert (outs[this] == torch.tensor(wanted, dtype=dtype)).all(), k
            if random.random() < 0.02:
                time.sleep(3e-3 * random.random())
            arrays[this].fill_(k % 50 + comm.rank)
            works[this] = comm.reduce_scatter(outs[this], arrays[this], "avg", async_op=True)
            assert is_posted(works[this])
            other = works[1 - this]
            if other is not None and random.random() < 0.5:
                other.done()
        for work in works:
            assert work is not None
            work.wait()


def test_the_same_bits_as_at_once(deferring: Communicator) -> None:
    comm = deferring
    counts = [5 + 3 * rank for rank in range(comm.size)]
    for dtype in (np.float32, np.float64, np.int32):
        x: Any = comm.node.empty(sum(counts), dtype)
        x[:] = np.random.default_rng(comm.rank).normal(size=x.size) * 100
        later, now = np.empty(counts[comm.rank], dtype), np.empty(counts[comm.rank], dtype)
        comm.reduce_scatter(later, x, "sum", counts=counts, async_op=True).wait()
        comm.reduce_scatter(now, x, "sum", counts=counts, algorithm="shared")
        assert later.tobytes() == now.tobytes()


def test_a_rank_goes_on_while_another_is_late(deferring: Communicator) -> None:
    """It posts, and posts again, before the other one has come to the first."""
    comm = deferring
    if comm.size == 1:
        pytest.skip("one rank waits for nobody")
    arrays = [comm.node.empty(8 * comm.size, np.float32) for _ in range(2)]
    outs = [np.empty(8, np.float32) for _ in range(2)]
    flag: Any = comm.node.shared(1, np.int64)
    comm.barrier()
    if comm.rank == 0:
        deadline = time.monotonic() + 20
        while not flag[0]:  # until rank 1 has posted both
            assert time.monotonic() < deadline
            time.sleep(1e-3)
    works = []
    for array, out in zip(arrays, outs, strict=True):
        array[:] = comm.rank + 1
        works.append(comm.reduce_scatter(out, array, async_op=True))
    if comm.rank == 1:
        assert not works[0].done(), "rank 0 has not posted it"
        flag[0] = 1
    for work, out in zip(works, outs, strict=True):
        work.wait()
        assert (out == sum(range(1, comm.size + 1))).all()
    comm.barrier()


def test_asking_is_enough(deferring: Communicator) -> None:
    """It ends on every rank although none waits for it."""
    comm = deferring
    x: Any = comm.node.empty(4 * comm.size, np.float32)
    out = np.zeros(4, np.float32)
    x[:] = comm.rank
    work = comm.reduce_scatter(out, x, "max", async_op=True)
    deadline = time.monotonic() + 20
    while not work.done():
        assert time.monotonic() < deadline
    assert (out == comm.size - 1).all()


def test_more_than_there_are_slots_for_and_another_collective(deferring: Communicator) -> None:
    comm = deferring
    arrays = [comm.node.empty(8 * comm.size, np.float32) for _ in range(11)]
    outs = [np.empty(8, np.float32) for _ in arrays]
    for k, array in enumerate(arrays):
        array[:] = k
    works = [comm.reduce_scatter(out, array, async_op=True) for out, array in zip(outs, arrays, strict=True)]
    total = np.ones(3)
    comm.all_reduce(total)  # what was issued before it comes before it
    assert all(work.done() for work in works)
    assert (total == comm.size).all()
    for k, out in enumerate(outs):
        assert (out == k * comm.size).all()


def test_what_cannot_be_posted_is_deferred(deferring: Communicator) -> None:
    comm = deferring
    private, shared = np.ones(4 * comm.size), comm.node.shared(4 * comm.size, np.float64)
    if comm.rank == 0:
        shared[:] = 1
    comm.barrier()
    in_node: Any = comm.node.empty(4 * comm.size, np.float64)
    in_node[:] = 1
    for x, options in ((private, {}), (shared, {}), (in_node, {"algorithm": "mpi"})):
        out = np.empty(4)
        work = comm.reduce_scatter(out, x, async_op=True, **options)
        assert not is_posted(work)
        work.wait()
        assert (out == comm.size).all()
    with pytest.raises(ValueError, match="accumulate"):
        comm.reduce_scatter(np.empty(4), in_node, accumulate="fp8", async_op=True)


# A barrier that nobody has to wait for


def test_a_barrier_ends_when_all_have_come(deferring: Communicator) -> None:
    comm = deferring
    for _ in range(20):
        comm.barrier(async_op=True)  # dropped: nobody waits
    flag: Any = comm.node.shared(comm.size, np.int64)
    for k in range(1, 50):
        if comm.rank == k % comm.size:
            time.sleep(1e-3)
        flag[comm.rank] = k
        work = comm.barrier(async_op=True)
        work.wait()
        assert work.done()
        assert (flag >= k).all()


def test_the_others_need_not_wait_for_it(deferring: Communicator) -> None:
    comm = deferring
    if comm.size == 1:
        pytest.skip("one rank waits for nobody")
    work = comm.barrier(async_op=True)
    if comm.rank == 0:
        work.wait()
        comm.send(np.ones(1), 1)  # the others come from their barrier to this without having waited
    elif comm.rank == 1:
        assert comm.recv(np.empty(1), 0)[0] == 1


@pytest.mark.ranks(4)
@pytest.mark.parametrize("algorithm", ["mpi", "ring"])
def test_a_rank_at_a_barrier_carries_out_what_others_wait_for(deferring: Communicator, algorithm: str) -> None:
    """In a mesh of 2 x 2 ranks 0 and 3 wait at the barriers of the rows, 1 and 2 for the sums of the columns."""
    mesh = Mesh(deferring, {"column": 2, "row": 2})
    for _ in range(20):
        x = np.ones(1000)
        total = mesh["column"].all_reduce(x, algorithm=algorithm, async_op=True)
        barrier = mesh["row"].barrier(async_op=True) if deferring.rank in (0, 3) else None
        if barrier is not None:
            barrier.wait()
        total.wait()
        if barrier is None:
            mesh["row"].barrier(async_op=True).wait()
        assert (x == 2).all()
    mesh.free()


def test_in_checked_mode_and_on_the_progress_thread(comm: Communicator) -> None:
    for made in (
        Communicator(comm.mpi.Dup(), progress=Deferred(), checked=True),
        Communicator(comm.mpi.Dup(), progress=Thread()),
    ):
        flag: Any = made.node.shared(made.size, np.int64)
        flag[made.rank] = 1
        work = made.barrier(async_op=True)
        assert work.wait() is None
        assert flag.all()
        made.free()
