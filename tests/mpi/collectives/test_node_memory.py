"""Memory that the ranks of a node share: what the arrays are, that it comes back, and that nothing is left behind."""

import gc
import os
import re
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from pretended_hosts import on_hosts

from benchmarks.chaos.disk import small_disk
from collectives import Communicator, on_all_ranks
from collectives.arrays.buffer import as_numpy, is_torch
from collectives.arrays.dtypes import TABLE
from collectives.environment import memory_folder
from collectives.transports.node import anonymous
from collectives.transports.node.mappings import on_change
from collectives.transports.node.memory import NodeMemory, free_in_folder
from collectives.transports.node.memory import room as room_in_memory

pytestmark = pytest.mark.one_node


def mapped() -> list[str]:
    """This process's mappings of node memory, on one rank without a file. MPI has files in a folder whose name begins so, too."""
    kinds = re.compile(r"/mpitrain-\d+-|/dev/zero \(deleted\)|/memfd:mpitrain")
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if kinds.search(line)]


def test_shared_is_one_memory_in_the_library_of_the_dtype(comm: Communicator) -> None:
    for row in TABLE.values():
        for dtype in (row.numpy, row.name, getattr(torch, row.name)):
            x = comm.node.shared((comm.size, 2), dtype)
            assert is_torch(x) == isinstance(dtype, torch.dtype)
            assert tuple(x.shape) == (comm.size, 2)
            assert as_numpy(x).dtype == row.numpy
            assert not x.any(), "zeros"
            comm.barrier()
            x[comm.rank] = 1
            comm.barrier()
            assert x.all(), "everyone's ones"
            comm.barrier()


def test_a_listener_hears_of_each_change_and_is_not_kept_alive(comm: Communicator) -> None:
    class Listener:
        def __init__(self, name: str) -> None:
            self._name = name

        def hear(self) -> None:
            heard.append(self._name)

    heard: list[str] = []
    memory, other = NodeMemory(comm.mpi), NodeMemory(comm.mpi)
    first, second = Listener("first"), Listener("second")
    for listener in (first, second):
        on_change(listener.hear)
    x = memory.shared(8)
    assert heard == ["first", "second"]
    del x
    assert heard == ["first", "second"] * 2, "unmapped"
    heard.clear()
    del first, listener, second
    third = Listener("third")
    on_change(third.hear)
    y = other.empty(8)
    assert heard == ["third"]
    del y
    assert heard == ["third"] * 2


def test_empty_is_an_array_of_one_s_own(comm: Communicator) -> None:
    for dtype in (np.float32, torch.bfloat16):
        x = comm.empty((3, 5), dtype)
        assert is_torch(x) == isinstance(dtype, torch.dtype)
        assert tuple(x.shape) == (3, 5)
        assert not x.any()
        assert as_numpy(x).ctypes.data % 64 == 0
        x[:] = comm.rank + 1
        comm.barrier()
        assert (x == comm.rank + 1).all(), "nobody else wrote here"


def test_shapes(comm: Communicator) -> None:
    for allocate in (comm.empty, comm.shared):
        for shape, expected in [
            (3, (3,)),
            ((), ()),
            ([2, 1], (2, 1)),
            (0, (0,)),
            (torch.Size([2]), (2,)),
            (np.int64(2), (2,)),
        ]:
            for dtype in (np.int16, torch.int16):
                assert tuple(allocate(shape, dtype).shape) == expected


def test_parts_of_an_array_are_node_memory_too(comm: Communicator) -> None:
    n = comm.size
    x = comm.empty((4, n, 6), torch.float32)
    x[:] = comm.rank
    comm.all_reduce(x[1:3], algorithm="shared")
    assert x[0].unique().tolist() == [comm.rank]
    assert x[1:3].unique().tolist() == [sum(range(n))]
    out = comm.empty(6, torch.float32)
    comm.reduce_scatter(out, x[2], "avg", algorithm="shared")
    assert out.tolist() == [sum(range(n))] * 6
    whole = comm.node.shared((3, n, 2), np.int32)
    comm.all_gather(whole[1], np.full(2, comm.rank + 1, np.int32), algorithm="shared")
    assert whole.sum(axis=(1, 2)).tolist() == [0, n * (n + 1), 0]


def test_all_gather_where_only_some_parts_stand_in_place(comm: Communicator) -> None:
    """Each rank may pass its own place or another array: the number of barriers must not depend on it."""
    whole = comm.node.shared((comm.size, 3), torch.float64)
    for turn in range(4):
        x = whole[comm.rank] if (comm.rank + turn) % 2 else torch.empty(3, dtype=torch.float64)
        x.fill_(comm.rank + turn)
        comm.all_gather(whole, x, algorithm="shared")
        assert whole[:, 0].tolist() == [float(rank + turn) for rank in range(comm.size)]
        comm.barrier()


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("algorithm", ["auto", "mpi", "ring", "recursive_doubling", "bruck"])
def test_all_gather_over_nodes_shows_other_ranks_no_wrong_elements(comm: Communicator, algorithm: str) -> None:
    """MPI libraries may use the result as scratch memory, and two ranks have one result: as equal parts, in place and not.

    The communicator need not be the one that has allocated the result.
    """
    hosts = on_hosts(comm.mpi, [0, *[1] * (comm.size - 1)])
    whole = hosts.node.shared((hosts.size, 100), torch.float32)
    expected = torch.arange(1.0, hosts.size + 1).repeat_interleave(100).reshape(whole.shape)
    groups = (hosts, hosts.split(0), comm)  # of these ranks
    for turn in range(60):
        mine = whole[hosts.rank] if turn % 2 else np.empty(100, np.float32)
        mine[:] = hosts.rank + 1
        chosen = "auto" if algorithm not in groups[turn % 3].algorithms("all_gather") else algorithm
        groups[turn % 3].all_gather(whole.numpy() if turn % 5 else whole, mine, algorithm=chosen)
        assert torch.equal(whole, expected), turn
        comm.barrier()
        if hosts.node.rank == 0:
            whole.zero_()
        comm.barrier()
    groups[1].free()
    hosts.free()


@pytest.mark.ranks(3)
def test_checked_mode_names_a_rank_that_gathers_over_nodes_into_other_memory(comm: Communicator) -> None:
    """Its long arrays would go by another algorithm."""
    hosts = on_hosts(comm.mpi, [0, 1, 1], checked=True)
    whole, mine = hosts.node.shared((3, 100_000), np.float32), np.ones(100_000, np.float32)
    assert hosts.all_gather(whole, mine).all()
    with pytest.raises(ValueError, match=r"rank 0: .* in private memory\).*\n.*rank 1, 2: .* in `shared` memory\)"):
        hosts.all_gather(whole if hosts.rank else np.empty_like(whole), mine)
    hosts.free()


@pytest.mark.ranks(3)
def test_an_address_that_becomes_shared_has_no_plan_of_private_memory(comm: Communicator) -> None:
    """Whichever communicator the new array is of."""
    sub = comm.split(0)
    out, mine = np.empty((3, 50), np.float32), np.full(50, comm.rank, np.float32)
    for _ in range(2):
        sub.all_gather(out, mine, algorithm="mpi")
    plans = sub._plans
    assert plans
    whole = comm.shared(10, np.float32)
    assert not plans
    sub.all_gather(out, mine, algorithm="mpi")
    del whole
    gc.collect()
    assert not plans
    sub.free()


def test_another_communicator_s_memory_is_ordinary_memory(comm: Communicator) -> None:
    group = comm.split(0, key=-comm.rank)
    x = group.empty(3, np.float32)
    for algorithm in ("auto", "shared"):
        x[:] = 1
        assert comm.all_reduce(x, algorithm=algorithm).tolist() == [comm.size] * 3
    group.free()


def test_an_array_that_some_ranks_have_let_go_of(comm: Communicator) -> None:
    """The first rank passes its part of an `empty` array, the others have dropped theirs and pass private ones."""
    x = comm.empty(1000, np.float32)
    if comm.rank:
        x = np.empty(1000, np.float32)
    x[:] = comm.rank + 1
    assert set(comm.all_reduce(x, algorithm="shared").tolist()) == {sum(range(1, comm.size + 1))}


def test_memory_goes_with_the_last_array_and_survives_its_communicator(comm: Communicator) -> None:
    gc.collect()
    outside = len(mapped())
    group = comm.split(0)
    before = len(mapped())  # with the pages on which this group's ranks meet
    x, y = group.shared(1 << 16, torch.float32), group.empty(1 << 16, np.float32)
    part = x[5:7].view(2, 1)
    assert len(mapped()) == before + 2
    comm.barrier()  # rank 0 has taken the names away
    assert all("(deleted)" in line for line in mapped()), "the files have no name any more"
    del x, y
    group.free()
    gc.collect()
    assert len(mapped()) == outside + 1, "a view keeps its memory, the group's pages are gone"
    part.fill_(3)
    assert part.tolist() == [[3.0], [3.0]]
    del part, group
    gc.collect()
    assert len(mapped()) == outside
    comm.barrier()


def test_many_allocations_leave_nothing_behind(comm: Communicator) -> None:
    gc.collect()
    before, files = len(mapped()), len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(50):
        comm.all_reduce(comm.empty(100, np.float32), algorithm="shared")
    assert len(mapped()) == before
    assert len(list(Path("/proc/self/fd").iterdir())) < files + 10, "MPI may have opened some"
    comm.barrier()
    # named after the process of rank 0: other jobs on this machine have files of their own
    assert not list(memory_folder().glob(f"mpitrain-{comm.broadcast_object(os.getpid())}-*"))
    comm.barrier()


def test_different_lengths_are_an_error_on_all_ranks(comm: Communicator) -> None:
    if comm.size == 1:
        pytest.skip("one rank cannot differ")
    for allocate in (comm.shared, comm.empty):
        with pytest.raises(ValueError, match=r"bytes asked for here, \d+ on rank 0") as caught:
            allocate(100 if comm.rank == 0 else 100_000, np.uint8)
        assert on_all_ranks(caught.value)
    assert comm.shared(3, np.uint8).tolist() == [0, 0, 0]


def test_a_folder_that_cannot_be_used_is_an_error_on_all_ranks(
    comm: Communicator, shared_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPITRAIN_SHM_DIR", str(shared_tmp / "not-there"))
    for allocate in (comm.shared, comm.empty):
        if comm.size == 1:  # needs no folder
            assert allocate(100, np.uint8).sum() == 0
            continue
        with pytest.raises(FileNotFoundError, match=r"cannot share .* of node memory in .*not-there: .*No such file"):
            allocate(100, np.uint8)
    monkeypatch.setenv("MPITRAIN_SHM_DIR", str(shared_tmp))
    x = comm.shared(100, np.uint8)
    x[comm.rank] = 1
    comm.barrier()
    assert x.sum() == comm.size
    assert not list(shared_tmp.iterdir())
    comm.barrier()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("room", ["missing", "boards", "nothing"])
def test_collectives_without_a_folder_have_the_same_bits(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, room: str
) -> None:
    """Without a folder, or with room for boards alone, by the same algorithms in anonymous memory; without any memory by MPI."""
    reserve, rng = NodeMemory._reserve, np.random.default_rng(comm.rank)
    given = rng.standard_normal(1 << 18).astype(np.float32)

    def reduced() -> tuple[list[np.ndarray], tuple[str, ...]]:
        group = Communicator(comm.mpi.Dup())
        total = group.all_reduce(given.copy())
        out, part = np.empty(given.size * comm.size, np.float32), np.empty(8, np.float32)
        group.all_gather(out, given)
        group.reduce_scatter(part, given[: 8 * comm.size].copy())
        half = group.all_reduce(torch.from_numpy(given[:1000]).to(torch.bfloat16)).float().numpy()
        mine = group.empty(given.size, np.float32, or_anonymous=True) if room != "nothing" else given.copy()
        mine[:] = given
        group.all_reduce(mine)
        names = group.algorithms("all_reduce")
        group.free()
        return [total, out, part, half, mine.copy()], names

    def short(fd: int, start: int, length: int) -> None:
        if start + length > 20_000:
            raise OSError("No space left on device")
        reserve(fd, start, length)

    def refuse(place: anonymous.FilePlace) -> int:
        raise PermissionError(f"Permission denied: {place.path}")

    expected, names = reduced()
    if room == "boards":
        monkeypatch.setattr(NodeMemory, "_reserve", staticmethod(short))
    else:
        monkeypatch.setenv("MPITRAIN_SHM_DIR", "/not-there")
    if room == "nothing":
        monkeypatch.setattr(anonymous, "open_at", refuse)
    found, names_now = reduced()
    if room == "nothing":
        assert names_now == tuple(name for name in names if name not in ("shared", "staged"))
        for one, other in zip(expected[:3], found, strict=False):
            np.testing.assert_allclose(one, other, atol=1e-5)  # MPI adds in an order of its own
    else:
        assert names_now == names
        assert all(map(np.array_equal, expected, found))


@pytest.mark.ranks(2)
def test_anonymous_memory_is_the_same_on_all_ranks_or_an_error_on_all(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPITRAIN_SHM_DIR", "/not-there")
    before = len(mapped())
    x = comm.shared((comm.size, 1 << 20), np.uint8, or_anonymous=True)
    x[comm.rank] = comm.rank + 1
    comm.barrier()
    assert len(mapped()) == before + 1 and x.min(1).tolist() == [1, 2]
    # The number of another process in this container, and a machine without that much memory.
    elsewhere = anonymous.FilePlace(f"/proc/{os.getpid()}/fd/0", 0, 0)
    for name, value, why in [
        ("place_of", lambda fd: elsewhere, "/fd/0 is another file here"),
        ("available_bytes", lambda: 1 << 10, "1 KiB of memory are available; ask for more memory"),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(anonymous, name, value)
            with pytest.raises(
                OSError, match=rf"in /not-there: .*; set MPITRAIN_SHM_DIR .*; nor is there .*: .*{why}"
            ) as caught:
                comm.shared(4096, np.uint8, or_anonymous=True)
            assert on_all_ranks(caught.value)
    monkeypatch.setenv("MPITRAIN_SHM_DIR", "")
    assert str(memory_folder()) == "/dev/shm", "an empty value is none"


@pytest.mark.ranks(1, 2)
def test_more_than_the_memory_is_an_error_and_ends_no_process(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(anonymous, "available_bytes", lambda: 100 << 20)
    comm.shared(1 << 20, np.uint8)
    for allocate in (comm.shared, comm.empty):
        for or_anonymous in (False, True):
            with pytest.raises(
                OSError, match=r"cannot .*: 100 MiB of memory are available; ask for more memory"
            ) as caught:
                allocate(101 << 20, np.uint8, or_anonymous=or_anonymous)
            assert on_all_ranks(caught.value)


@pytest.mark.ranks(1)
def test_a_folder_without_a_limit_has_room(
    comm: Communicator, shared_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tmpfs with size=0, and ramfs: their size is 0."""
    with ExitStack() as mounted:
        try:
            mounted.enter_context(small_disk(shared_tmp / "shm", 0))
        except PermissionError as error:
            pytest.skip(f"a file system cannot be mounted here: {error}")
        monkeypatch.setenv("MPITRAIN_SHM_DIR", str(shared_tmp / "shm"))
        assert os.statvfs(memory_folder()).f_blocks == 0
        assert free_in_folder() > 1 << 50 and 0 < room_in_memory() <= anonymous.available_bytes() + (1 << 30)
        monkeypatch.setenv("MPITRAIN_SHM_DIR", "/not-there")
        assert free_in_folder() == room_in_memory() == 0


@pytest.mark.ranks(2)
def test_a_system_without_dev_shm_says_where_node_memory_lies(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("MPITRAIN_SHM_DIR", raising=False)
    monkeypatch.setattr("collectives.environment.USUAL_MEMORY_FOLDER", Path("/nonexistent/shm"))
    monkeypatch.setattr("collectives.transports.node.memory._said", set())
    for _ in range(2):
        NodeMemory(comm.mpi).shared(8)
    said = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert len(said) == (comm.rank == 0), said
    assert all(f"node memory lies in {memory_folder()}" in each and "set MPITRAIN_SHM_DIR" in each for each in said)
