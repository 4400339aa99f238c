"""Threads that save at the same time: each its own values, each its own errors, none in the way of another."""

import copy
import gc
import os
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from checkpoints import names
from thread_ranks import on_ranks

import ckpt
from ckpt.commit import atomic
from ckpt.saving import background, buffers
from ckpt.saving import save as saving
from ckpt.storage.catalog import LATEST_NAME
from ckpt.storage.local_path import LocalPath


@pytest.fixture(autouse=True)
def nothing_goes_on():
    yield
    ckpt.wait()
    assert not background._pending and gc.isenabled()


def in_threads(count, act):
    """`act(i)` in so many threads that begin together; what they return. What the first raises is raised."""
    together = threading.Barrier(count)

    def begin(i):
        together.wait(60)
        return act(i)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))


def save(path, value, size=200_000, **options):
    return ckpt.save(path, {"x": np.full(size, float(value)), "s": np.array(value)}, comm=None, **options)


def value_of(path):
    checkpoint = ckpt.open(path)
    x = checkpoint["x"].read()
    assert (x == x[0]).all() and x[0] == checkpoint["s"].read(), path
    return int(x[0])


def test_a_save_in_the_background_has_what_there_was_at_the_call(tmp_path, monkeypatch):
    """Values, lists and dicts at any depth; also if the program changes them before the thread has begun."""
    changed = threading.Event()
    original = saving.write_index

    def write_index(*args):
        assert changed.wait(20)
        original(*args)

    monkeypatch.setattr(saving, "write_index", write_index)
    at_call = {"data": {"position": 7, "files": [["a", 1], {"b": [2.5]}]}, "steps": [1]}
    meta = copy.deepcopy(at_call)
    x, scalar, shape, offset = np.zeros(10), np.array(3), [10], [0]
    tensors = {"x": x, "scalar": scalar, "shard": [ckpt.Shard(x, shape, offset)]}
    places = [tmp_path / "copies"]
    ckpt.save(tmp_path / "c", tensors, comm=None, meta=meta, copies=places, background=True)
    meta["data"]["position"], meta["data"]["files"][1]["b"][0] = 8, 9
    meta["data"]["files"][0].append("c")
    meta["steps"].clear()
    meta["more"] = 1
    x += 1
    scalar += 1
    shape[0], offset[0] = 20, 5
    tensors["other"] = x
    places.append(tmp_path / "elsewhere")
    changed.set()
    ckpt.wait()
    for place in (tmp_path, tmp_path / "copies"):
        saved = ckpt.open(place / "c")
        assert saved.meta == at_call and list(saved.names) == ["scalar", "shard", "x"]
        assert saved["x"][...].tolist() == saved["shard"][...].tolist() == [0] * 10 and saved["scalar"][...] == 3
    assert not (tmp_path / "elsewhere").exists()


def loaded(path):
    found = np.zeros(9)
    ckpt.load(path, {"x": found}, strict=False)
    return found[0]


def slowly():
    time.sleep(0.03)


def fails():
    time.sleep(0.03)
    raise OSError("the folder is lost")


@pytest.mark.rest
@pytest.mark.parametrize("read", [
    value_of,
    lambda path: loaded(path),
    lambda path: len(ckpt.verify(path)) + value_of(path),
    lambda path: value_of(ckpt.find(path)),
    lambda path: in_threads(1, lambda _: value_of(path))[0],
    lambda path: value_of(path.parent / "copies" / path.name),
])  # fmt: skip
def test_who_reads_waits_for_the_save(tmp_path, monkeypatch, read):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    for options in ({}, {"overwrite": True}):
        value = 1 + len(options)
        save("link/a", value, 9, background=True, before_commit=slowly, copies=["copies"], **options)
        assert read(tmp_path / "a") == value
    assert value_of("a") == 2


def test_who_reads_is_told_that_the_save_has_failed(tmp_path):
    for act, kind, message in (
        (
            lambda: ckpt.open(tmp_path / "a"),
            ckpt.CheckpointError,
            r"/a does not exist: its save .* has failed.*: the folder is lost",
        ),
        (lambda: ckpt.load(tmp_path / "a", {"x": np.zeros(9)}), OSError, "^the folder is lost"),
    ):
        save(tmp_path / "a", 1, 9, background=True, before_commit=fails)
        with pytest.raises(kind, match=message):
            act()
        if kind is not OSError:
            with pytest.raises(OSError, match="the folder is lost"):
                ckpt.wait()


def test_saves_in_the_background_hold_the_values_of_their_thread(tmp_path):
    """Of different sizes, so that a buffer is found that another thread has given back."""

    def act(i):
        for step in range(8):
            save(tmp_path / str(i) / f"step-{step}", 10 * i + step, 50_000 * (1 + (i + step) % 3), background=True)
        ckpt.wait()

    in_threads(3, act)
    assert [[value_of(tmp_path / f"{i}/step-{step}") for step in range(8)] for i in range(3)] == [
        [10 * i + step for step in range(8)] for i in range(3)
    ]
    assert len(buffers._free) <= 4  # one for each that went on at the same time, and an earlier test's


def test_a_buffer_is_used_again(tmp_path):
    buffers._free.clear()
    addresses = set()
    for step in range(4):
        save(tmp_path / f"step-{step}", step, 200_000 - step, background=True)
        ckpt.wait()
        (buffer,) = buffers._free
        addresses.add(buffer.ctypes.data)
    assert len(addresses) == 1
    save(tmp_path / "step-5", 5, 400_000, background=True)
    ckpt.wait()
    assert [buffer.size >= 3_200_000 for buffer in buffers._free] == [True], "in place of the smaller one"


@pytest.mark.parametrize("in_background", [False, True])
def test_one_folder(tmp_path, in_background):
    """Each removes what is old there. Nobody is told that another was faster."""

    def act(i):
        for step in range(6):
            save(tmp_path / "run" / f"step-{6 * i + step}", 6 * i + step, 1000, keep=2, background=in_background)
        ckpt.wait()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        in_threads(3, act)
    assert (tmp_path / "run" / (tmp_path / "run" / LATEST_NAME).read_text().strip()).is_dir()
    save(tmp_path / "run" / "step-99", 99, keep=2)
    left = names(tmp_path / "run")
    assert len(left) == 3 and left[0] == LATEST_NAME and left[2] == "step-99", left
    assert all(value_of(tmp_path / "run" / name) == int(name[5:]) for name in left[1:])


def test_one_name_is_written_by_one_of_them(tmp_path):
    refused = []

    def act(i):
        for _ in range(6):
            try:
                save(tmp_path / "a", i, overwrite=True)
            except FileExistsError as error:
                refused.append(str(error))

    save(tmp_path / "a", 0)
    in_threads(3, act)
    assert set(refused) <= {
        f"[Errno 17] another thread of this process is writing this checkpoint: '{tmp_path / '.a.staging'}'"
    }
    assert names(tmp_path) == ["a", LATEST_NAME] and value_of(tmp_path / "a") in range(3)


def test_one_name_until_what_it_replaces_is_gone(tmp_path, monkeypatch):
    plain = atomic.take_away

    def meanwhile(path):
        with pytest.raises(FileExistsError, match="another thread of this process is writing"):
            atomic.Stage(LocalPath(tmp_path / "a")).open(overwrite=True)
        plain(path)

    save(tmp_path / "a", 1)
    monkeypatch.setattr(atomic, "take_away", meanwhile)
    save(tmp_path / "a", 2, overwrite=True)
    assert names(tmp_path) == ["a", LATEST_NAME] and value_of(tmp_path / "a") == 2


def test_each_thread_hears_of_its_own_failure(tmp_path):
    """The second thread's save fails."""
    plain = ckpt.saving.save._carry_out

    def failing(job, *args):
        if job.final.name == "b":
            raise OSError(28, "No space left on device", str(job.final))
        plain(job, *args)

    def act(i):
        save(tmp_path / "ab"[i], i, background=True)
        done.wait(60)
        try:
            ckpt.wait()
        except OSError as error:
            return str(error)

    done = threading.Barrier(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ckpt.saving.save, "_carry_out", failing)
        assert in_threads(2, act) == [None, f"[Errno 28] No space left on device: '{tmp_path / 'b'}'"]
        # one that nobody asked about is told to who asks for all
        for tell in (ckpt.wait, lambda: ThreadPoolExecutor(1).submit(ckpt.wait).result()):
            threading.Thread(target=save, args=(tmp_path / "b", 1), kwargs={"background": True}).run()
            with ThreadPoolExecutor(1) as pool:
                pool.submit(save, tmp_path / "b", 1, background=True).exception()
            with pytest.raises(OSError, match="No space left"):
                tell()
            with pytest.raises(OSError, match="No space left"):
                ckpt.wait()
    assert names(tmp_path) == ["a", LATEST_NAME]


def test_who_lets_others_save_waits_for_all(tmp_path):
    """A pool's thread, which lives on, began the save; another thread asks."""
    with ThreadPoolExecutor(1) as pool, ThreadPoolExecutor(1) as asking:
        pool.submit(save, tmp_path / "a", 1, 2_000_000, background=True).result()
        asking.submit(ckpt.wait).result()
        assert value_of(tmp_path / "a") == 1


def test_ranks_that_save_from_several_threads(tmp_path):
    """Each of two pairs of ranks over a communicator of its own, all four in one process: the one does not wait for the other."""

    def act(pair):
        def of_rank(comm):
            for step in range(3):
                rows = np.full((500, 10), 100.0 * pair + 10 * step + comm.rank)
                shard = ckpt.Shard(rows, (1000, 10), (500 * comm.rank, 0))
                ckpt.save(tmp_path / "run" / f"{pair}-{step}", {"x": shard}, comm=comm, background=True)
            ckpt.wait()

        on_ranks(2, of_rank)

    in_threads(2, act)
    for pair in range(2):
        for step in range(3):
            x = ckpt.open(tmp_path / "run" / f"{pair}-{step}")["x"].read()
            assert (x[:500] == 100 * pair + 10 * step).all() and (x[500:] == 100 * pair + 10 * step + 1).all()
    assert not [name for name in os.listdir(tmp_path / "run") if name.startswith(".")]


def test_a_save_waits_for_the_one_before_it_over_its_communicator(tmp_path, monkeypatch):
    """Whichever thread began that, and on all ranks: the error of the one is raised by the other. No empty folder is left."""

    def fail(*args):
        raise OSError(28, "No space left on device", "somewhere")

    def of_rank(comm):
        tensors = {"x": np.ones(4)}
        with ThreadPoolExecutor(1) as pool:
            pool.submit(ckpt.save, tmp_path / "new" / "run" / "a", tensors, comm=comm, background=True).result()
            with pytest.raises(OSError, match="No space left on device"):
                ckpt.save(tmp_path / "b", tensors, comm=comm)

    monkeypatch.setattr(ckpt.saving.save, "_carry_out", fail)
    on_ranks(2, of_rank)
    assert names(tmp_path) == []


@pytest.mark.parametrize("size", [1, 2])
def test_ctrl_c_while_the_values_are_copied(tmp_path, monkeypatch, size):
    """The name, the buffer and the folders are free again for a session that goes on."""

    def interrupted(*args):
        raise KeyboardInterrupt

    def of_rank(comm):
        tensors = {"x": np.ones(4)}
        with pytest.raises(KeyboardInterrupt):
            ckpt.save(tmp_path / "run" / "a", tensors, comm=comm, background=True)
        comm.barrier()
        if comm.rank == 0:
            assert names(tmp_path) == []
            monkeypatch.undo()
        comm.barrier()
        free = len(buffers._free)
        ckpt.save(tmp_path / "run" / "a", tensors, comm=comm, background=True)
        ckpt.wait()
        return free

    monkeypatch.setattr(ckpt.saving.save, "copied", interrupted)
    assert min(on_ranks(size, of_rank)) >= 1
    assert names(tmp_path / "run") == ["a", LATEST_NAME]


def test_copies_of_several_threads(tmp_path):
    """Uploads of one folder: what one is writing is no dead job's to another."""
    import fsspec

    place = f"memory://{tmp_path.name}/copy"

    def act(i):
        for step in range(3):
            save(tmp_path / "home" / f"{i}-{step}", 10 * i + step, 1000, copies=[place, tmp_path / "copy"])

    try:
        in_threads(3, act)
        for i in range(3):
            for step in range(3):
                assert value_of(f"{place}/{i}-{step}") == value_of(tmp_path / "copy" / f"{i}-{step}") == 10 * i + step
    finally:
        fsspec.filesystem("memory").rm("/", recursive=True)
