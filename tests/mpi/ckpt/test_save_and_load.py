"""Saving and loading between ranks: any N to any M bit for bit, and every error raised on all ranks."""

import re
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import h5py
import ml_dtypes
import numpy as np
import pytest
from checkpoints import flip_bit, names
from ways import spread

import ckpt
import collectives

DTYPES = ("float32", "bfloat16", "int64", "bool", "complex64", "float8_e4m3fn")


def full_tensors():
    """The same on all ranks: random bits in several shapes, few rows and many."""
    rng = np.random.default_rng(3)
    tensors = {}
    for dtype in DTYPES:
        kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
        for label, shape in {"long": (37,), "wide": (2, 30), "cube": (5, 4, 6), "none": (0, 3), "one": (1, 1)}.items():
            bits = rng.bytes(int(np.prod(shape)) * kind.itemsize)
            array = np.frombuffer(bits, kind).reshape(shape)
            tensors[f"{dtype}/{label}"] = (
                array if dtype != "bool" else np.frombuffer(bits, "u1").reshape(shape) % 2 == 1
            )
    return tensors


def shard(array, rank, size, axis):
    """This rank's near-equal part along `axis`, which may be empty."""
    axis = min(axis, array.ndim - 1)
    low, high = array.shape[axis] * rank // size, array.shape[axis] * (rank + 1) // size
    where = tuple(slice(low, high) if d == axis else slice(None) for d in range(array.ndim))
    offset = tuple(low if d == axis else 0 for d in range(array.ndim))
    return ckpt.Shard(np.ascontiguousarray(array[where]), array.shape, offset)


@pytest.fixture(scope="module")
def first(comm):
    """For each n up to the number of ranks: the communicator of the first n ranks (for the others: of the rest)."""
    groups = {n: comm.split(int(comm.rank >= n)) for n in range(1, comm.size + 1)}
    yield groups
    for group in groups.values():
        group.free()


@pytest.mark.parametrize("axes", [(0, 0), (0, 1), (1, 0), (1, 2)])
def test_any_number_of_ranks_reloads_what_any_other_saved(comm, first, shared_tmp, axes):
    tensors = full_tensors()
    replicated = {"step": np.array(17), "rng": np.arange(200, dtype="u1"), "scale": np.array(2.5, "f4")}
    save_axis, load_axis = axes
    for n in range(1, comm.size + 1):
        if comm.rank < n:
            mine = {name: shard(array, comm.rank, n, save_axis) for name, array in tensors.items()} | replicated
            if comm.rank % 2:  # the order of a dict means nothing
                mine = dict(reversed(mine.items()))
            ckpt.save(shared_tmp / f"n{n}", mine, comm=first[n], meta={"n": n})
    comm.barrier()
    for n in range(1, comm.size + 1):
        for m in range(1, comm.size + 1):
            if comm.rank < m:
                out = {name: shard(np.zeros_like(a), comm.rank, m, load_axis) for name, a in tensors.items()}
                others = {name: np.zeros_like(array) for name, array in replicated.items()}
                assert ckpt.load(shared_tmp / f"n{n}", out | others, comm=first[m]) == {"n": n}
                for name, array in tensors.items():
                    expected = shard(array, comm.rank, m, load_axis).data
                    assert out[name].data.tobytes() == expected.tobytes(), (n, m, name)
                assert all(np.array_equal(others[name], array) for name, array in replicated.items())
    # and one process, and another tool
    checkpoint = ckpt.open(shared_tmp / f"n{comm.size}")
    with h5py.File(shared_tmp / f"n{comm.size}" / "index.h5") as index:
        for name, array in tensors.items():
            assert checkpoint[name].read().tobytes() == array.tobytes()
            shown = index[name][...]  # float8 as bytes, bf16 widened
            same_size = shown.itemsize == array.itemsize
            assert np.array_equal(
                shown.view("u1") if same_size else shown,
                array.view("u1") if same_size else array.astype(shown.dtype),
                equal_nan=not same_size,
            )


def test_replicated_tensors_are_written_once_and_spread(comm, shared_tmp):
    tensors = {f"x{i}": np.full(1000 + i, i) for i in range(8)}
    path = ckpt.save(shared_tmp / "a", tensors, comm=comm)
    blocks = [entry.blocks for entry in ckpt.open(path).values()]
    assert all(len(found) == 1 for found in blocks)
    used = [found[0][0] for found in blocks]
    assert set(used) == {f"rank-{rank:05d}.h5" for rank in range(comm.size)}
    assert max(map(used.count, used)) - min(map(used.count, used)) <= 1


def test_ranks_may_ask_for_different_parts(comm, shared_tmp):
    x = np.arange(60.0).reshape(12, 5)
    path = ckpt.save(shared_tmp / "a", {"x": shard(x, comm.rank, comm.size, 0), "y": np.ones(3)}, comm=comm)
    out = np.zeros((2 + comm.rank, 3))
    wanted = {"x": ckpt.Shard(out, x.shape, (comm.rank, 1))}
    if comm.rank == 0:
        wanted["y"] = np.zeros(3)
    ckpt.load(path, wanted, comm=comm, strict=False)
    assert np.array_equal(out, x[comm.rank : 2 * comm.rank + 2, 1:4])
    if comm.rank == 0:
        assert (wanted["y"] == 1).all()


# Files and drivers


@pytest.mark.rest
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("files", "driver"), spread(["rank", "node", "one", 2, 1000], ["posix", "mpio", "mpio-collective"])
)
def test_all_drivers_write_the_same_files(comm, shared_tmp, files, driver):
    tensors = full_tensors()
    mine = {name: shard(array, comm.rank, comm.size, 0) for name, array in tensors.items()} | {"step": np.array(3)}
    path = ckpt.save(shared_tmp / "a", mine, comm=comm, files=files, driver=driver)
    plain = ckpt.save(shared_tmp / "b", mine, comm=comm, files=files)
    count = {"rank": comm.size, "node": 1, "one": 1, 2: min(2, comm.size), 1000: comm.size}[files]
    data_files = sorted(name for name in ckpt.open(path).files if name != "index.h5")
    assert len(data_files) == count
    for name in [*data_files, "index.h5"]:
        assert (path / name).read_bytes() == (plain / name).read_bytes(), name
    # Other tools see nothing strange either: their HDF5 runs in a child, which is no rank.
    assert ckpt.verify(path, threads=1, hdf5=comm.rank == 0) == []
    out = {name: shard(np.zeros_like(array), comm.rank, comm.size, 1) for name, array in tensors.items()}
    ckpt.load(path, out, comm=comm, only=[f"{dtype}/*" for dtype in DTYPES])
    for name, array in tensors.items():
        assert out[name].data.tobytes() == shard(array, comm.rank, comm.size, 1).data.tobytes(), name


def test_wrong_files_and_drivers(comm, shared_tmp):
    def save(**options):
        return lambda: ckpt.save(shared_tmp / "a", {"x": np.zeros(2)}, comm=comm, **options)

    refused(comm, ValueError, "a number of at least 1", save(files=0))
    refused(comm, ValueError, "expected 'posix', 'mpio' or 'mpio-collective'", save(driver="mpi"))
    refused(comm, ValueError, "in the background", save(driver="mpio", background=True))
    assert names(shared_tmp) == []


def test_what_is_no_communicator_is_named(comm, shared_tmp):
    with pytest.raises(TypeError, match=r"comm is a Intracomm; expected a collectives\.Communicator, such as"):
        ckpt.save(shared_tmp / "a", {"x": np.zeros(2)}, comm=comm.mpi)
    with pytest.raises(TypeError, match="comm is a int; expected"):
        ckpt.save(shared_tmp / "a", {"x": np.zeros(2)}, comm=comm.size)
    assert names(shared_tmp) == []


# In the background


def test_a_save_in_the_background_holds_the_values_of_its_time(comm, shared_tmp):
    rows, count = 4000, 5
    data = np.zeros((rows, 3))
    x = ckpt.Shard(data, (rows * comm.size, 3), (rows * comm.rank, 0))
    step = np.array(0)
    for number in range(1, count + 1):
        data[:] = step[...] = number
        files = "rank" if number % 2 else "one"
        path = ckpt.save(
            shared_tmp / f"step-{number}", {"x": x, "step": step}, comm=comm, background=True, keep=3, files=files
        )
        data[:] = step[...] = -1
    ckpt.wait()
    ckpt.wait()  # nothing is left to wait for
    assert path == shared_tmp / f"step-{count}" and ckpt.latest(shared_tmp) == path
    comm.barrier()
    assert names(shared_tmp) == ["latest", *(f"step-{number}" for number in range(count - 2, count + 1))]
    for number in range(count - 2, count + 1):
        checkpoint = ckpt.open(shared_tmp / f"step-{number}")
        assert (checkpoint["x"].read() == number).all() and checkpoint["step"].read() == number
        assert ckpt.verify(checkpoint.path, threads=1) == []


def test_threads_save_at_the_same_time(comm, shared_tmp):
    """Each over a communicator of its own, into one folder: each checkpoint holds its thread's values."""
    rows = 20_000
    comms = [comm.split(0) for _ in range(2)]

    def act(i):
        for step in range(3):
            value = np.full((rows, 1), 100.0 * i + 10 * step + comm.rank)
            shard = ckpt.Shard(value, (rows * comm.size, 1), (rows * comm.rank, 0))
            ckpt.save(shared_tmp / f"{i}-{step}", {"x": shard}, comm=comms[i], background=step < 2)
        ckpt.wait()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(act, range(2)))
    comm.barrier()
    if comm.rank == 0:
        for i, step in product(range(2), range(3)):
            x = ckpt.open(shared_tmp / f"{i}-{step}")["x"].read().reshape(comm.size, rows)
            assert (x == 100 * i + 10 * step + np.arange(comm.size)[:, None]).all()
    assert names(shared_tmp) == [*(f"{i}-{step}" for i, step in product(range(2), range(3))), "latest"]
    for each in comms:
        each.free()


def test_ranks_that_save_each_alone_under_one_name(comm, shared_tmp):
    """One of them has the name, and the others are told so."""
    for number in range(10):
        path = shared_tmp / f"step-{number}"
        comm.barrier()
        try:
            ckpt.save(path, {"x": np.full(3, comm.rank)})
            said = ""
        except FileExistsError as error:
            said = str(error)
        everyone = comm.all_gather_object(said)
        assert everyone.count("") == 1 and (ckpt.open(path)["x"].read() == everyone.index("")).all()
        told = r"process \d+ is writing this checkpoint; ranks that save one together pass comm|this checkpoint exists; pass overw"
        assert all(not said or re.search(told, said) for said in everyone), everyone
    assert names(shared_tmp) == ["latest", *(f"step-{number}" for number in range(10))]


def test_all_ranks_wait_for_the_saves_of_threads_in_one_order(comm, shared_tmp, monkeypatch):
    """Whichever thread was first: on every second rank it is the other one."""
    comms = [comm.split(0) for _ in range(2)]
    was_begun = threading.Event()
    plain = ckpt.saving.save.begin

    def begin(over, *args):
        is_first = (over is comms[0]) == (comm.rank % 2 == 0)
        assert is_first or was_begun.wait(60)
        plain(over, *args)
        if is_first:
            was_begun.set()

    def act(i):
        ckpt.save(shared_tmp / str(i), {"x": np.full(3, i)}, comm=comms[i], background=True)

    monkeypatch.setattr(ckpt.saving.save, "begin", begin)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(act, range(2)))
    with ThreadPoolExecutor(1) as pool:  # a thread that has begun none
        pool.submit(ckpt.wait).result()
    assert names(shared_tmp) == ["0", "1", "latest"]
    for each in comms:
        each.free()


def test_an_error_in_the_background_comes_with_the_next_call(comm, shared_tmp):
    ckpt.save(shared_tmp / "b", {"x": np.arange(20.0)}, comm=comm)
    rows = np.zeros((1 << 16, 1))
    large = {"x": ckpt.Shard(rows, (rows.size * comm.size, 1), (rows.size * comm.rank, 0))}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if comm.rank == comm.size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        ckpt.save(shared_tmp / "c", large, comm=comm, background=True)
        message = rf"\.c\.staging/rank-{comm.size - 1:05d}\.h5"
        refused(comm, OSError, message, lambda: ckpt.save(shared_tmp / "d", large, comm=comm))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    comm.barrier()
    assert names(shared_tmp) == ["b", "latest"] and ckpt.latest(shared_tmp) == shared_tmp / "b"
    ckpt.save(shared_tmp / "d", large, comm=comm, background=True)  # and the next one succeeds
    ckpt.wait()
    assert ckpt.latest(shared_tmp) == shared_tmp / "d"


# Errors


def refused(comm, error, message, action):
    """`action` raises the same `error` on all ranks; returns its text."""
    with pytest.raises(error, match=message) as caught:
        action()
    assert collectives.on_all_ranks(caught.value) or comm.size == 1
    texts = comm.all_gather_object(str(caught.value))
    assert len(set(texts)) == 1
    return texts[0]


def disagreements(rank):
    """What the last rank brings, against {"x": array of 4 floats, in shards of (4, 2)} of the others."""
    return {
        "name": ({"y": np.zeros(4)}, "has 'x'.*has not|has 'y'.*has not"),
        "dtype": ({"x": np.zeros(4, "f4")}, r"'x' is float64 \(4,\) on rank 0, but float32 \(4,\) on rank"),
        "shape": ({"x": np.zeros(5)}, r"'x' is float64 \(4,\) on rank 0, but float64 \(5,\)"),
        "kind": ({"x": ckpt.Shard(np.zeros(4), (4,), (0,))}, r"but float64 \(4,\) in shards on rank"),
        "bad": ({"x": np.zeros(4, object)}, "tensor 'x': dtype object is not supported"),
    }


@pytest.mark.parametrize("case", ["name", "dtype", "shape", "kind", "bad"])
def test_a_rank_that_disagrees_stops_all_before_anything_is_written(comm, shared_tmp, case):
    if comm.size == 1:
        pytest.skip("takes two ranks to disagree")
    tensors, message = {"x": np.zeros(4)}, disagreements(comm.rank)[case][1]
    if comm.rank == comm.size - 1:
        tensors = disagreements(comm.rank)[case][0]
    refused(comm, ValueError, message, lambda: ckpt.save(shared_tmp / "a", tensors, comm=comm))
    assert names(shared_tmp) == []


def test_gaps_and_overlaps_are_found(comm, shared_tmp):
    rows = 3
    full = (rows * comm.size + 1, 2)
    gap = {"x": ckpt.Shard(np.zeros((rows, 2)), full, (rows * comm.rank, 0))}
    message = rf"tensor 'x': no rank holds element \({rows * comm.size}, 0\)"
    refused(comm, ValueError, message, lambda: ckpt.save(shared_tmp / "a", gap, comm=comm))
    if comm.size > 1:
        overlap = {"x": ckpt.Shard(np.zeros((rows + 1, 2)), full, (rows * comm.rank, 0))}
        refused(
            comm, ValueError, "rank 0's box .* and rank 1's", lambda: ckpt.save(shared_tmp / "a", overlap, comm=comm)
        )
        scalar = {"x": ckpt.Shard(np.zeros(()), (), ())}
        refused(comm, ValueError, "overlap", lambda: ckpt.save(shared_tmp / "a", scalar, comm=comm))
    assert names(shared_tmp) == []


@pytest.mark.parametrize(
    ("name", "others", "last"),
    [
        ("files", "rank", "one"),
        ("files", 1, "one"),
        ("driver", "posix", "mpio"),
        ("background", False, True),
        ("keep", None, 2),
        ("keep_every", 10, 20),
        ("overwrite", True, False),
        ("path", "a", "b"),
    ],
)
def test_arguments_that_differ_are_an_error_on_all(comm, shared_tmp, name, others, last):
    if comm.size == 1 or (last == "mpio" and not h5py.get_config().mpi):
        pytest.skip("needs another rank, or h5py on parallel HDF5")
    options = {"path": "a", name: last if comm.rank == comm.size - 1 else others}
    path = shared_tmp / options.pop("path")
    message = (
        rf"ckpt\.save: {name} is .*{others}'? on rank 0, but .*{last}'? on rank {comm.size - 1}; expected the same on"
    )
    refused(comm, ValueError, message, lambda: ckpt.save(path, {"x": np.ones(2)}, comm=comm, **options))
    assert names(shared_tmp) == []
    ckpt.wait()


def test_a_write_that_fails_on_one_rank_fails_on_all_and_loses_nothing(comm, shared_tmp):
    old = np.arange(20.0)
    ckpt.save(shared_tmp / "step-1", {"x": old}, comm=comm)
    rows = np.zeros((1 << 16, 1))
    tensors = {"x": ckpt.Shard(rows, (rows.size * comm.size, 1), (rows.size * comm.rank, 0))}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if comm.rank == comm.size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        message = rf"\.step-2\.staging/rank-{comm.size - 1:05d}\.h5"
        refused(comm, OSError, message, lambda: ckpt.save(shared_tmp / "step-2", tensors, comm=comm, keep=1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    comm.barrier()
    assert names(shared_tmp) == ["latest", "step-1"]
    out = np.zeros(20)
    ckpt.load(ckpt.latest(shared_tmp), {"x": out}, comm=comm)
    assert np.array_equal(out, old)
    # and the next one succeeds
    ckpt.save(shared_tmp / "step-2", tensors, comm=comm, keep=1)
    comm.barrier()
    assert names(shared_tmp) == ["latest", "step-2"]


def test_an_existing_name_is_refused_on_all(comm, shared_tmp):
    ckpt.save(shared_tmp / "a", {"x": np.zeros(2)}, comm=comm)
    refused(comm, FileExistsError, "overwrite=True", lambda: ckpt.save(shared_tmp / "a", {"x": np.ones(2)}, comm=comm))
    ckpt.save(shared_tmp / "a", {"x": np.ones(2)}, comm=comm, overwrite=True)
    out = np.zeros(2)
    ckpt.load(shared_tmp / "a", {"x": out}, comm=comm)
    assert (out == 1).all()


def test_a_missing_checkpoint_is_an_error_on_all(comm, shared_tmp):
    refused(comm, ckpt.CheckpointError, "does not exist", lambda: ckpt.load(shared_tmp / "a", {}, comm=comm))


def test_damage_that_one_rank_finds_is_an_error_on_all(comm, shared_tmp):
    x = np.arange(40.0).reshape(40, 1) * comm.size
    tensors = {"x": shard(x, comm.rank, comm.size, 0)}
    path = ckpt.save(shared_tmp / "a", tensors, comm=comm)
    comm.barrier()
    if comm.rank == 0:
        flip_bit(path / f"rank-{comm.size - 1:05d}.h5")
    comm.barrier()
    message = rf"tensor 'x': rank-{comm.size - 1:05d}\.h5 is damaged"
    refused(comm, ckpt.CheckpointError, message, lambda: ckpt.load(path, tensors, comm=comm))


def test_a_name_that_one_rank_misses_is_an_error_on_all(comm, shared_tmp):
    path = ckpt.save(shared_tmp / "a", {"x": np.zeros(2)}, comm=comm)
    wanted = {"y" if comm.rank == comm.size - 1 else "x": np.ones(2)}
    refused(comm, ckpt.CheckpointError, "does not hold 'y'", lambda: ckpt.load(path, wanted, comm=comm))
    assert all((array == 1).all() for array in wanted.values())


@pytest.mark.ranks(2)
def test_a_load_waits_for_the_save_in_the_background(comm, shared_tmp):
    """Of the same ranks, of others, and of one rank alone."""

    def held(value):
        return {"x": ckpt.Shard(np.full(3, float(value)), (3 * comm.size,), (3 * comm.rank,))}

    def save(name, value, **options):
        ckpt.save(shared_tmp / name, held(value), comm=comm, background=True, **options)

    def slowly():
        time.sleep(0.03)

    def fails():
        slowly()
        raise OSError("the folder is lost")

    others, found = comm.split(0), held(0)
    for value, ranks in enumerate((comm, others, None), 1):
        save("a", value, before_commit=slowly, overwrite=True)
        ckpt.load(shared_tmp / "a", found, comm=ranks)
        assert (found["x"].data == value).all()
    save("b", 4, before_commit=slowly)
    if comm.rank == comm.size - 1:
        assert ckpt.open(shared_tmp / "b")["x"][0] == 4
    save("c", 5, before_commit=fails)
    refused(comm, OSError, "the folder is lost", lambda: ckpt.load(shared_tmp / "c", found, comm=comm))
    ckpt.wait()
    others.free()
