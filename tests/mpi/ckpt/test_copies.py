"""Copies made by real ranks: each its own file, also in the background; a place that fills up on one; loading goes on on all."""

import resource
import warnings
from contextlib import contextmanager

import numpy as np
import pytest
from checkpoints import flip_bit, names

import ckpt
import collectives
from ckpt.storage.places import absolute

ROWS = 1 << 16  # 512 KiB a rank


@pytest.fixture(params=["folder", "local"])
def place(request, shared_tmp):
    """A further place: a local folder, and fsspec's local files, which all ranks see as they would a remote store."""
    return ("local://" if request.param == "local" else "") + str(shared_tmp / "copy")


def shard(comm, value):
    return ckpt.Shard(np.full((ROWS, 1), float(value + comm.rank)), (ROWS * comm.size, 1), (ROWS * comm.rank, 0))


@contextmanager
def warned(comm, message):
    """The block warns so on rank 0, and on no other."""
    if comm.rank == 0:
        with pytest.warns(RuntimeWarning, match=message):
            yield
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield


@contextmanager
def small_files(comm):
    """On the last rank no file may grow beyond 100 kB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if comm.rank == comm.size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.rest
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("files", "driver"), [("rank", "posix"), ("one", "posix"), ("one", "mpio")])
def test_ranks_copy_what_they_wrote(comm, shared_tmp, place, files, driver, background):
    if driver == "mpio" and (background or not pytest.importorskip("h5py").get_config().mpi):
        pytest.skip("needs h5py on parallel HDF5, and MPI beside the training")
    options = {"files": files, "driver": driver, "background": background, "copies": [place], "keep": 1}
    for step in (1, 2):
        ckpt.save(shared_tmp / "home" / f"step-{step}", {"x": shard(comm, step)}, comm=comm, **options)
    ckpt.wait()
    comm.barrier()
    copy = absolute(place) / "step-2"
    assert names(place) == ["latest", "step-2"] and ckpt.verify(copy, threads=1) == []
    assert all((copy / name).read() == (shared_tmp / "home/step-2" / name).read_bytes() for name in names(copy))
    out = shard(comm, 0)
    ckpt.load(copy, {"x": out}, comm=comm)
    assert (out.data == 2 + comm.rank).all()


@pytest.mark.parametrize("background", [False, True])
def test_a_place_that_fills_up_on_one_rank_is_a_warning(comm, shared_tmp, place, background, monkeypatch):
    plain = ckpt.saving.save.make_copies

    def on_a_full_disk(*args, **kwargs):
        with small_files(comm):
            plain(*args, **kwargs)

    monkeypatch.setattr(ckpt.saving.save, "make_copies", on_a_full_disk)
    home = shared_tmp / "home" / "a"
    with warned(comm, rf"the copy .*copy/a was not made: .*File too large.*rank-{comm.size - 1:05d}\.h5.*stands"):
        ckpt.save(home, {"x": shard(comm, 1)}, comm=comm, copies=[place], background=background)
        ckpt.wait()
    comm.barrier()
    assert names(shared_tmp) == ["home"] and ckpt.verify(home, threads=1) == []
    comm.barrier()
    monkeypatch.undo()
    ckpt.save(home, {"x": shard(comm, 2)}, comm=comm, copies=[place], overwrite=True)
    comm.barrier()
    assert names(place) == ["a", "latest"] and ckpt.verify(absolute(place) / "a", threads=1) == []


def test_damage_that_one_rank_meets_takes_all_to_the_copy(comm, shared_tmp, place):
    path = ckpt.save(shared_tmp / "home" / "a", {"x": shard(comm, 1)}, comm=comm, copies=[place])
    comm.barrier()
    if comm.rank == comm.size - 1:
        flip_bit(path / f"rank-{comm.rank:05d}.h5")
    comm.barrier()
    out = shard(comm, 0)
    with warned(comm, rf"rank-{comm.size - 1:05d}\.h5 is damaged.*; going on with the copy .*copy/a"):
        ckpt.load(path, {"x": out}, comm=comm, copies=[place])
    assert (out.data == 1 + comm.rank).all()
    comm.barrier()
    if comm.rank == 0:
        (absolute(place) / "a" / "index.h5").unlink()
    comm.barrier()
    with warned(comm, "going on"), pytest.raises(ckpt.CheckpointError, match=r"none of 2 copies.*index\.h5") as caught:
        ckpt.load(path, {"x": out}, comm=comm, copies=[place])
    assert collectives.on_all_ranks(caught.value) or comm.size == 1


def test_a_warning_that_is_made_an_error_is_one_on_all_ranks(comm, shared_tmp):
    if comm.rank == 0:
        (shared_tmp / "copy").write_text("a file")
    comm.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="was not made"):
            ckpt.save(shared_tmp / "home" / "a", {"x": shard(comm, 1)}, comm=comm, copies=[shared_tmp / "copy"])
    comm.barrier()
    assert ckpt.latest(shared_tmp / "home") == shared_tmp / "home" / "a"
