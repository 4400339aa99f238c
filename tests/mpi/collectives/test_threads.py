"""Several threads: each with a communicator of its own, in turns on one, and refused where they meet on one."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from collectives import Communicator
from collectives.progress.deferred import Deferred
from collectives.progress.on_thread import Thread
from collectives.progress.work import Work

NUM_THREADS = 4


@pytest.mark.rest
@pytest.mark.parametrize("kind", [Deferred, Thread])
def test_threads_with_communicators_of_their_own(comm: Communicator, kind: type[Deferred | Thread]) -> None:
    """All in one process, with asynchronous operations, whatever order the threads run in."""
    progress = kind()
    parts = [Communicator(comm.mpi.Dup(), progress=progress) for _ in range(NUM_THREADS)]

    def work(number: int) -> int:
        part, n = parts[number], comm.size
        right, left = (comm.rank + 1) % n, (comm.rank - 1) % n
        for turn in range(20):
            one, other, came = (np.full(100 * (number + 1) + turn, comm.rank + float(number)) for _ in range(3))
            total = n * (n - 1) / 2 + n * number
            begun = part.all_reduce(one, async_op=True)
            assert (part.all_reduce(other) == total).all()
            exchange = [
                part.irecv(came, left, tag=number),
                part.isend(np.full_like(came, 10.0 * number), right, tag=number),
            ]
            last = part.all_reduce(came * 0 + 1, async_op=True)
            for each in exchange:
                each.wait()
            assert (came == 10 * number).all() and (last.wait() == n).all() and (begun.wait() == total).all()
        return number

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        assert list(pool.map(work, range(NUM_THREADS))) == list(range(NUM_THREADS))
    for part in parts:
        part.free()
    progress.close()


@pytest.mark.parametrize("kind", [Deferred, Thread])
def test_threads_that_take_turns(comm: Communicator, kind: type[Deferred | Thread]) -> None:
    """One thread issues and another waits; a thread that ends hands the communicator on."""
    progress = kind()
    part = Communicator(comm.mpi.Dup(), progress=progress)
    x, y = np.ones(1000), np.ones(5)
    works = [part.all_reduce(x, async_op=True), part.barrier(async_op=True), part.all_reduce(y, async_op=True)]
    in_thread(works[2].wait)
    assert (y == part.size).all() and works[0].done()
    in_thread(works[1].wait)
    in_thread(lambda: part.all_reduce(x))
    assert (part.all_reduce(x) == part.size**3).all()
    part.free()
    progress.close()


@pytest.mark.parametrize("kind", [Deferred, Thread])
def test_what_a_thread_left_is_carried_out_before_the_next_one_s(
    comm: Communicator, kind: type[Deferred | Thread]
) -> None:
    """Also where the thread has looked on some ranks, which carries it out there when all have issued it."""
    progress = kind()
    part = Communicator(comm.mpi.Dup(), progress=progress)
    calls: list[Callable[[np.ndarray], object]] = [
        part.all_reduce,
        lambda x: part.all_reduce(x, async_op=True).wait(),
        lambda x: x.__imul__(sum(part.all_gather_object(1))),
    ]
    for call in calls * 2:  # with a plan the second time
        x, y = np.ones(1000), np.full(1000, 5.0)

        def leave(x: np.ndarray = x) -> Work:
            work = part.all_reduce(x, async_op=True)
            comm.barrier()
            if comm.rank > 0:
                work.done()
            return work

        with ThreadPoolExecutor(1) as pool:
            work = pool.submit(leave).result()
        call(y)
        assert (work.wait() == comm.size).all() and (y == 5 * comm.size).all()
    part.free()
    progress.close()


def in_thread(call: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result()


@pytest.mark.parametrize("algorithm", ["mpi", "auto"])
def test_messages_of_several_threads(comm: Communicator, algorithm: str) -> None:
    """On one communicator, each with its tag, beside collectives of the main thread."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def work(tag: int) -> None:
        for turn in range(50):
            x, y = np.full(100, tag + turn), np.empty(100, int)
            sent = comm.isend(x, right, tag)
            if turn % 2:
                comm.irecv(y, left, tag).wait()
            else:
                comm.recv(y, left, tag)
            sent.wait()
            assert (y == tag + turn).all()

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        done = [pool.submit(work, tag) for tag in range(1, NUM_THREADS + 1)]
        for _ in range(20):
            assert (comm.all_reduce(np.ones(10), algorithm=algorithm) == comm.size).all()
        for each in done:
            each.result()


def test_a_second_thread_inside_a_communicator_is_refused(comm: Communicator) -> None:
    """Rank 0 has a thread in a barrier to which the others come only when its main thread has been refused."""
    if comm.size == 1:
        pytest.skip("nobody waits")
    part = comm.split(0)
    x = np.ones(3)
    for _ in range(3):
        part.all_reduce(x)  # has a plan
    if comm.rank == 0:
        thread = threading.Thread(target=part.barrier)
        thread.start()
        while part._recorder.log.latest.name != "barrier":
            pass
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: part.all_reduce(x),
            "all_gather": lambda: part.all_gather(np.empty(3 * part.size), x),
            "barrier": part.barrier,
            "broadcast_object": lambda: part.broadcast_object(1),
            "split": lambda: part.split(0),
        }
        words = r" on .*, by thread MainThread, while another thread was inside barrier.* expected one thread.*comm\.split\(0\)"
        for name, call in calls.items():
            with pytest.raises(RuntimeError, match=name + words):
                call()
        comm.send(x, 1)  # on another communicator the main thread goes on
    elif comm.rank == 1:
        comm.recv(x, 0)
    comm.barrier()
    if comm.rank == 0:
        part.mpi.send(None, 1)  # by MPI itself: the order of `part` is lost on rank 0
        thread.join()
        with pytest.raises(RuntimeError, match="barrier" + words):
            part.barrier()  # also when nobody is inside any more
    else:
        if comm.rank == 1:
            part.mpi.recv(source=0)
        part.barrier()


def test_a_group_is_its_thread_s(comm: Communicator) -> None:
    """Else another thread's operation would wait for the group's end, and return without a result."""
    x = np.ones(3)
    with comm.group():
        comm.all_reduce(x)
        for name, call in {
            "all_reduce": lambda: comm.all_reduce(np.ones(2)),
            "send": lambda: comm.send(np.ones(2), 0),
            "group": lambda: comm.group().__enter__(),
        }.items():
            with pytest.raises(
                RuntimeError, match=f"{name} on world .* while another thread was inside a group; expected"
            ):
                in_thread(call)
    assert (x == comm.size).all()
