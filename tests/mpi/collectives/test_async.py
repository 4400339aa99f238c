"""Operations in flight, on the progress thread and without: the same program is right on both. Groups, and a soak of all together."""

import gc
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from extent import extent

from collectives import Communicator, Work
from collectives.progress.deferred import Deferred
from collectives.progress.on_thread import Thread


@pytest.fixture(scope="module", params=[Deferred, Thread])
def flying(request: pytest.FixtureRequest, comm: Communicator) -> Communicator:
    return Communicator(comm.mpi.Dup(), progress=request.param())


def ranks_sum(comm: Communicator) -> int:
    return sum(range(1, comm.size + 1))


def test_results_and_waiting_twice(flying: Communicator) -> None:
    for algorithm in ("auto", *flying.algorithms("all_reduce")):
        x = torch.full((77,), flying.rank + 1, dtype=torch.bfloat16)
        work = flying.all_reduce(x, algorithm=algorithm, async_op=True)
        assert isinstance(work, Work)
        assert work.wait() is x
        assert work.done()
        assert work.wait() is x, "waiting twice is no error"
        assert (x == ranks_sum(flying)).all()


def test_several_in_flight_end_in_any_order(flying: Communicator) -> None:
    n, rank = flying.size, flying.rank
    whole = [np.arange(6.0) + r for r in range(n)]
    a, b, c, s = whole[rank].copy(), np.empty(6 * n), whole[rank].copy(), np.empty(6)
    d, e, f = np.empty(6 * n) if rank == 0 else None, np.empty(6), np.empty(6 * n)
    everything = np.concatenate(whole)
    works = [
        flying.broadcast(a, n - 1, async_op=True),
        flying.all_gather(b, whole[rank], async_op=True),
        flying.reduce(c, 0, "max", async_op=True),
        flying.gather(d, whole[rank], async_op=True),
        flying.scatter(e, everything if rank == 0 else None, async_op=True),
        flying.all_to_all(f, everything, async_op=True),
        flying.reduce_scatter(s, everything, async_op=True),
    ]
    for work in reversed(works):
        while not work.done():
            pass
        work.wait()
    assert (a == whole[n - 1]).all()
    assert (b == everything).all()
    assert (c == (whole[n - 1] if rank == 0 else whole[rank])).all()
    assert d is None or (d == everything).all()
    assert (e == whole[rank]).all()
    assert (f == np.concatenate([whole[rank]] * n)).all()
    assert (s == whole[rank] * n).all()


def test_a_work_that_nobody_holds_keeps_its_arrays(flying: Communicator) -> None:
    x = np.full(1 << 16, flying.rank + 1.0)
    flying.all_reduce(np.full(1 << 16, 1.0), async_op=True)  # dropped at once, and its array with it
    work = flying.all_reduce(x, async_op=True)
    garbage = [np.full(1 << 16, -1.0) for _ in range(4)]
    work.wait()
    assert (x == ranks_sum(flying)).all()
    assert all((array == -1.0).all() for array in garbage)


@pytest.mark.parametrize("is_held", [True, False])  # the communicator
def test_a_message_that_nobody_holds_keeps_its_array(flying: Communicator, is_held: bool) -> None:
    n, rank, length = flying.size, flying.rank, 1 << 20
    comm: Communicator | None = flying.split(0)
    assert comm is not None
    right, left = (rank + 1) % n, (rank - 1) % n
    comm.isend(np.full(length, rank + 1.0), right)  # both dropped at once, and their arrays with them
    comm.irecv(np.empty(length), left, tag=1)
    into, mpi, tag = np.empty(length), comm.mpi, 256  # where messages of tag 0 travel
    if not is_held:
        comm = None
    gc.collect()
    garbage = [np.full(length, -1.0) for _ in range(4)]
    flying.barrier()
    mpi.Recv(into, left, tag)
    mpi.Send(np.full(length, 7.0), right, tag + 1)
    flying.barrier()
    assert (into == left + 1).all()
    assert all((array == -1.0).all() for array in garbage)
    if comm is not None:
        assert len(comm._messages.in_flight.transfers) == 2
        comm.free()
        assert not comm._messages.in_flight.transfers


def test_messages_that_nobody_holds_are_let_go_when_they_are_through(flying: Communicator) -> None:
    alive: list[weakref.ref[np.ndarray]] = []
    waiting = [flying.irecv(np.empty(1), flying.rank, tag=9) for _ in range(40)]
    for _ in range(200):
        x = np.zeros(3)
        alive.append(weakref.ref(x))
        flying.isend(x, flying.rank)
        flying.recv(np.empty(3), flying.rank)
    del x
    assert sum(each() is not None for each in alive) <= 2 * 41
    for _ in waiting:
        flying.isend(np.ones(1), flying.rank, tag=9)
    assert sum(work.wait()[0] for work in waiting) == 40
    flying._messages.in_flight.finish()
    assert all(each() is None for each in alive)


def test_freeing_a_communicator_waits_for_messages(flying: Communicator) -> None:
    group, into = flying.split(0), np.empty(1 << 18)
    receiving = group.irecv(into, (group.rank - 1) % group.size)
    group.isend(np.full(1 << 18, float(group.rank)), (group.rank + 1) % group.size)
    group.free()
    assert receiving.done()
    assert receiving.wait() is into
    assert (into == (flying.rank - 1) % flying.size).all()


@pytest.mark.parametrize("first", ["asynchronous", "at once"])
def test_checked_mode_finds_that_only_some_ranks_pass_async_op(comm: Communicator, first: str) -> None:
    if comm.size == 1:
        pytest.skip("one rank cannot differ")
    for progress in (Deferred(), Thread()):
        checked = Communicator(comm.mpi.Dup(), progress=progress, checked=True)
        odd = (checked.rank == 0) is (first == "asynchronous")
        x, start = np.ones(3), time.monotonic()

        def call(checked: Communicator = checked, odd: bool = odd, x: np.ndarray = x) -> None:
            checked.all_reduce(x, async_op=True) if odd else checked.all_reduce(x)
            checked.barrier()  # before any wait

        with pytest.raises(ValueError, match="the ranks call different collectives") as caught:
            call()
        assert time.monotonic() - start < 2
        assert "async_op=True" in str(caught.value) or "preparing asynchronous operations" in str(caught.value)
        assert (x == 1).all()
        checked.free()


def test_errors_that_a_rank_cannot_see_alone_are_raised_at_wait(flying: Communicator) -> None:
    if flying.size == 1:
        pytest.skip("one rank cannot differ")
    checked = Communicator(flying.mpi.Dup(), progress=type(flying._queue.progress)(), checked=True)
    work = checked.all_reduce(np.ones(3 if checked.rank else 4), async_op=True)
    for _ in range(2):
        with pytest.raises(ValueError, match="the ranks call different collectives"):
            work.wait()
    assert work.done()
    assert checked.all_reduce(np.ones(3), async_op=True).wait().tolist() == [flying.size] * 3
    checked.free()


def test_waiting_within_a_group_for_what_was_issued_before(flying: Communicator) -> None:
    x, y = np.full(3, flying.rank + 1), np.full(4, flying.rank + 1)
    work = flying.all_reduce(x, async_op=True)
    with flying.group():
        flying.all_reduce(y)
        assert (work.wait() == ranks_sum(flying)).all()
        assert (y == flying.rank + 1).all()
    assert (y == ranks_sum(flying)).all()


def test_synchronous_calls_keep_their_place_among_asynchronous_ones(flying: Communicator) -> None:
    """Half of the ranks wait before the synchronous call, half after it."""
    a, b = np.full(5, flying.rank + 1), np.full(7, flying.rank + 1)
    work = flying.all_reduce(a, async_op=True)
    if flying.rank % 2:
        work.wait()
    flying.all_reduce(b)
    flying.barrier()
    assert flying.all_gather_object(flying.rank) == list(range(flying.size))
    assert (work.wait() == ranks_sum(flying)).all()
    assert (b == ranks_sum(flying)).all()


@pytest.mark.parametrize("nbytes", [8, 1 << 20])  # one that MPI sends at once, one that waits for its receiver
def test_messages_between_issuing_and_waiting(flying: Communicator, nbytes: int) -> None:
    """A message may wait for a rank that has not come to the collective yet, or for one that waits in it."""
    if flying.size == 1:
        pytest.skip("a message needs two ranks")
    x, message = np.full(3, flying.rank + 1), np.full(nbytes // 8, float(flying.rank))
    if flying.rank == 0:
        work = flying.all_reduce(x, async_op=True)
        flying.send(message, 1)  # before rank 1 issues its part
        work.wait()
        flying.send(message, 1)
    elif flying.rank == 1:
        into = np.empty_like(message)
        assert not flying.recv(into, 0).any()
        work = flying.all_reduce(x, async_op=True)
        flying.recv(into, 0)  # before this rank waits: rank 0 sends it after its own wait
        work.wait()
    else:
        flying.all_reduce(x, async_op=True).wait()
    assert (x == ranks_sum(flying)).all()


def test_isend_and_irecv(flying: Communicator) -> None:
    n, rank = flying.size, flying.rank
    if n == 1:
        pytest.skip("a message needs two ranks")
    right, left = (rank + 1) % n, (rank - 1) % n
    x, into = torch.full((1 << 15,), float(rank)), torch.empty(1 << 15)
    receiving, sending = flying.irecv(into, left, tag=2), flying.isend(x, right, tag=2)
    assert receiving.wait() is into
    assert sending.wait() is x
    assert sending.done()
    assert (into == left).all()
    if rank == 0:
        flying.send(np.zeros(2), 1)
        flying.send(np.zeros(9), 1)
        flying.send(np.ones(4), 1)
    elif rank == 1:
        x4 = np.empty(4)
        with pytest.raises(ValueError, match="irecv: rank 0 sent 16 bytes, but x has 32"):
            flying.irecv(x4, 0).wait()
        with pytest.raises(ValueError, match="irecv: rank 0 sent more than the 32 bytes of x"):
            flying.irecv(x4, 0).wait()
        assert flying.irecv(x4, 0).wait().tolist() == [1] * 4


def test_group_shares_messages_and_keeps_order(flying: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    n, rank = flying.size, flying.rank
    small = [np.full(3 + i, rank + 1.0) for i in range(4)]
    large, ints = np.full(1 << 17, rank + 1.0), [np.full(2, rank + 1), np.full(3, rank + 1)]
    flags, halves = np.array([rank == 0]), torch.full((5,), rank, dtype=torch.bfloat16)
    lowest = np.full(2, rank + 1.0)
    gathered = np.empty(n)
    calls = []
    transport = flying._transports.of("mpi")
    for name in ("all_reduce", "broadcast"):
        count = getattr(transport, name)
        monkeypatch.setattr(transport, name, lambda *a, f=count, name=name: (calls.append(name), f(*a)))
    with flying.group():
        for x in small:
            assert flying.all_reduce(x, algorithm="mpi") is x
        flying.all_reduce(large)
        flying.all_reduce(lowest, "min", algorithm="mpi")
        for x in ints:
            flying.all_reduce(x, algorithm="mpi")
        flying.broadcast(flags, algorithm="mpi")
        flying.broadcast(halves, algorithm="mpi")
        flying.all_gather(gathered, np.array([float(rank)]))
        assert (small[0] == rank + 1).all(), "nothing is carried out before the end"
    assert calls.count("all_reduce") <= 4, "four small ones in one message, two integer ones in one"
    assert calls.count("broadcast") == 1, "what is only moved shares a message whatever its type"
    for x in (*small, large, *ints):
        assert (x == ranks_sum(flying)).all()
    assert (lowest == 1).all()
    assert flags.tolist() == [True]
    assert (halves == 0).all()
    assert gathered.tolist() == list(range(n))


@pytest.mark.parametrize("length", [4, 1 << 17])  # one that shares a message with others, one that does not
def test_a_group_gives_arrays_that_overlap_what_calls_in_turn_would(flying: Communicator, length: int) -> None:
    n, rank = flying.size, flying.rank
    x, y, z = np.full(length, rank + 1.0), np.arange(2.0 * length), np.full(3, rank + 1.0)
    w, v = np.full(length, rank + 1.0), np.full(length, rank + 1.0)
    into = np.empty(length)
    with flying.group():
        flying.all_reduce(x)
        flying.all_reduce(z)
        flying.all_reduce(x)
        flying.all_reduce(y[: length + 2])
        flying.all_reduce(y[length:])
        flying.reduce(w, 0)
        flying.reduce(w, 0)
        flying.broadcast(v, n - 1)
        flying.broadcast(into if rank < n - 1 else x, n - 1)  # x: where its all-reduces have come to
        flying.broadcast(into if rank < n - 1 else v, n - 1)  # the last one stays
    total = ranks_sum(flying)
    assert (x == n * total).all()
    assert (z == total).all()
    expected = np.arange(2.0 * length) * n
    expected[length : length + 2] *= n
    assert (y == expected).all()
    assert (w == (total + sum(range(2, n + 1)) if rank == 0 else rank + 1)).all()
    assert (v == n).all()
    assert rank == n - 1 or (into == n).all()


@pytest.mark.parametrize("length", [4, 1 << 17])  # one that MPI sends at once, one that waits for its receiver
def test_messages_of_a_group_set_out_before_its_collectives_and_arrive_after_them(
    flying: Communicator, length: int
) -> None:
    n, rank = flying.size, flying.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    a, b, c = np.full(length, rank + 1.0), np.full(length, rank + 1.0), np.full(length, rank + 1.0)
    total, gathered = np.ones(length), np.empty(n * length)
    with flying.group():
        flying.all_reduce(a)
        flying.send(a, right)
        flying.recv(b, left)
        flying.all_reduce(b)  # of what stands in it before the message arrives
        flying.all_gather(gathered, b)
        flying.send(c, right, tag=1)
        flying.recv(c, left, tag=1)
        flying.send(c, right, tag=2)
        flying.recv(total, left, tag=2)
    assert (a == ranks_sum(flying)).all()
    assert (gathered == ranks_sum(flying)).all()
    assert (b == left + 1).all()
    assert (c == left + 1).all()
    assert (total == left + 1).all()


def test_group_of_messages_in_any_order(flying: Communicator) -> None:
    n, rank = flying.size, flying.rank
    peers = [peer for peer in range(n) if peer != rank]
    into = {peer: np.empty(1 << 16) for peer in peers}
    with flying.group():  # all send first: without a group that would wait for ever
        for peer in peers:
            flying.send(np.full(1 << 16, 10.0 * rank + peer), peer)
        for peer in peers:
            flying.recv(into[peer], peer)
    assert all((x == 10.0 * peer + rank).all() for peer, x in into.items())


def test_group_mistakes(flying: Communicator) -> None:
    x = np.ones(3)
    with flying.group(), pytest.raises(ValueError, match="within a group take no async_op"):
        flying.all_reduce(x, async_op=True)

    def fail() -> None:
        with flying.group():
            flying.all_reduce(x)
            raise KeyError("stop")

    with pytest.raises(KeyError):
        fail()
    assert x.tolist() == [1, 1, 1], "nothing is done if the block ends with an exception"


def test_a_group_within_a_group_is_a_part_of_it(flying: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    n, rank = flying.size, flying.rank
    outer, inner, innermost, last = (np.full(3, rank + 1.0) for _ in range(4))
    into = np.empty(1 << 15)
    calls = []
    transport = flying._transports.of("mpi")
    all_reduce = transport.all_reduce
    monkeypatch.setattr(transport, "all_reduce", lambda *a: (calls.append(a), all_reduce(*a)))
    with flying.group():
        flying.all_reduce(outer, algorithm="mpi")
        with flying.group():
            flying.recv(into, (rank - 1) % n)
            flying.all_reduce(inner, algorithm="mpi")
            with flying.group():
                flying.all_reduce(innermost, algorithm="mpi")
            flying.send(np.full(1 << 15, float(rank)), (rank + 1) % n)
        assert (inner == rank + 1).all(), "nothing is carried out before the end of the outermost"
        flying.all_reduce(last, algorithm="mpi")
    assert all((x == ranks_sum(flying)).all() for x in (outer, inner, innermost, last))
    assert (into == (rank - 1) % n).all()
    assert len(calls) == 1, "neighbours share a message across the blocks"


def test_an_exception_in_a_group_within_a_group_discards_all(flying: Communicator) -> None:
    x = np.ones(3)

    def fail(catch: type[Exception]) -> None:
        with flying.group():
            flying.all_reduce(x)
            with suppress(catch), flying.group():
                flying.all_reduce(x)
                raise KeyError("stop")
            flying.all_reduce(x)

    with pytest.raises(KeyError, match="stop"):
        fail(OSError)
    with pytest.raises(
        ValueError, match="no operation ran, because a group within this one ended with an exc"
    ) as caught:
        fail(KeyError)
    assert isinstance(caught.value.__cause__, KeyError)
    assert x.tolist() == [1, 1, 1]
    with flying.group(), flying.group():
        flying.all_reduce(x)
    assert (x == flying.size).all()


@pytest.mark.parametrize("length", [1, 1 << 17])  # one that MPI sends at once, one that waits for its receiver
def test_messages_to_oneself(flying: Communicator, length: int) -> None:
    me = flying.rank
    x, y = np.full(length, me + 0.5), torch.full((length,), me, dtype=torch.bfloat16)
    into, other = np.zeros(length), torch.zeros(length, dtype=torch.bfloat16)
    pending = flying.all_reduce(np.ones(2), async_op=True)
    sending, receiving = flying.isend(x, me, tag=5), flying.irecv(into, me, tag=5)
    assert receiving.wait() is into
    assert sending.wait() is x
    assert (into == x).all()
    receiving = flying.irecv(other, me)
    flying.send(y, me)  # its receive is posted
    assert (receiving.wait() == me).all()
    sending = flying.isend(2 * x, me)
    assert (flying.recv(into, me) == 2 * x).all()
    sending.wait()
    into[...], other[...] = 0, 0
    with flying.group():
        flying.send(x, me)
        flying.send(y, me, tag=1)
        flying.recv(other, me, tag=1)
        flying.recv(into, me)
    assert (into == x).all()
    assert (other == me).all()
    assert pending.wait().tolist() == [flying.size] * 2


def test_blocking_messages_to_oneself_that_would_never_end(flying: Communicator) -> None:
    x, into, me = np.arange(3.0), np.empty(3), flying.rank
    receiving = flying.irecv(into, me, tag=1)  # which is no help to another tag
    with pytest.raises(ValueError, match=rf"send: peer {me} is this rank.*; use isend and irecv, or group\(\)"):
        flying.send(x, me)
    flying.send(x, me, tag=1)
    assert receiving.wait().tolist() == [0, 1, 2]
    for tag in (0, 1):
        with pytest.raises(ValueError, match=rf"recv: peer {me} is this rank, which has sent no such message"):
            flying.recv(into, me, tag)
    sending = flying.isend(x[:2], me)
    with pytest.raises(ValueError, match=f"recv: rank {me} sent 16 bytes, but x has 24"):
        flying.recv(into, me)
    sending.wait()
    with pytest.raises(ValueError, match="recv: peer"):
        flying.recv(into, me)  # that one message is gone


@pytest.mark.rest
def test_soak_of_mixed_calls_on_two_communicators(flying: Communicator) -> None:
    """2,000 operations (20,000 in a full run) of all kinds, on many sizes and types, some in flight, on two communicators in turn."""
    n, rank = flying.size, flying.rank
    other = flying.split(0, key=-rank)
    draw = np.random.default_rng(7)  # the same on all ranks
    in_flight: list[tuple[Work, Callable[[], Any], int]] = []
    dtypes = (np.float32, np.float64, np.int32, torch.bfloat16)
    for turn in range(extent(2_000, 20_000)):
        comm = (flying, other)[int(draw.integers(2))]
        me = comm.rank
        operation = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all")[
            draw.integers(6)
        ]
        dtype, size, root = dtypes[draw.integers(4)], int(2 ** draw.uniform(0, 9)), int(draw.integers(n))
        choice = ("auto", *comm.algorithms(operation))
        algorithm, is_async = choice[draw.integers(len(choice))], bool(draw.integers(4) == 0)
        full = torch.full if isinstance(dtype, torch.dtype) else np.full

        def make(length: int, value: int, full: Any = full, dtype: Any = dtype) -> Any:
            return full((length,), value, dtype=dtype)

        options = {"algorithm": algorithm, "async_op": is_async}
        x, total = make(size, me + 1), ranks_sum(comm)
        match operation:
            case "all_reduce":
                result, expected = comm.all_reduce(x, **options), make(size, total)
            case "all_gather":
                result = comm.all_gather(make(size * n, 0), x, **options)
                expected = make(size * n, 0)
                for r in range(n):
                    expected[r * size : (r + 1) * size] = r + 1
            case "reduce_scatter":
                result, expected = comm.reduce_scatter(x, make(size * n, me + 1), **options), make(size, total)
            case "broadcast":
                result, expected = comm.broadcast(x, root, **options), make(size, root + 1)
            case "reduce":
                result, expected = comm.reduce(x, root, **options), make(size, total if me == root else me + 1)
            case _:
                result, expected = comm.all_to_all(make(size * n, 0), make(size * n, me + 1), **options), None
                expected = make(size * n, 0)
                for r in range(n):
                    expected[r * size : (r + 1) * size] = r + 1
        if is_async:
            in_flight.append((result, expected, turn))
            while len(in_flight) > draw.integers(4):
                work, expected, issued = in_flight.pop(int(draw.integers(len(in_flight))))
                assert (work.wait() == expected).all(), issued
        else:
            assert (result == expected).all(), (turn, operation, dtype, size, options)
    for work, expected, issued in in_flight:
        assert (work.wait() == expected).all(), issued
    other.free()


def test_another_table_is_for_what_is_issued_after_it(flying: Communicator) -> None:
    """Whatever was issued before has chosen by the old one, on all ranks."""
    x = np.full(100_000, flying.rank + 1.0)
    work = flying.all_reduce(x, async_op=True)
    flying.use_table(flying.table)
    assert work.done()
    assert (work.wait() == ranks_sum(flying)).all()


def test_freeing_a_communicator_waits_for_what_is_in_flight(flying: Communicator) -> None:
    group = flying.split(0)
    x = np.full(100_000, group.rank + 1.0)
    work = group.all_reduce(x, async_op=True)
    group.free()
    assert work.done()
    assert (work.wait() == ranks_sum(flying)).all()
    group.free()  # once more is no error
    for use in (
        lambda: group.all_reduce(x),
        lambda: group.all_reduce(x, async_op=True),
        lambda: group.barrier(),
        lambda: group.broadcast_object(1),
        lambda: group.all_gather_object(1),
        lambda: group.use_table(flying.table),
        lambda: group.split(0),
        lambda: group.empty(3, np.float32),
    ):
        with pytest.raises(
            ValueError, match=r"this communicator was freed; create another by world\(\), split\(\) or Mesh"
        ):
            use()
