"""Copies in further places: the same bytes, published or absent, never the end of a run; loading goes on to the next good one."""

import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoints import flip_bit, names
from thread_ranks import on_ranks

import ckpt
from ckpt.saving import copies as copying
from ckpt.storage import local
from ckpt.storage.catalog import LATEST_NAME
from ckpt.storage.local_path import LocalPath
from ckpt.storage.places import absolute


@pytest.fixture(params=["folder", "memory", "local"])
def place(request, tmp_path):
    """A further place of each kind: a local folder, fsspec's memory, fsspec's local files (which have real errors)."""
    if request.param == "memory":
        import fsspec

        yield f"memory://{tmp_path.name}/copy"
        fsspec.filesystem("memory").rm("/", recursive=True)
    else:
        yield ("local://" if request.param == "local" else "") + str(tmp_path / "copy")


def state(value):
    return {"x": np.full((40, 3), float(value)), "s": np.array(value)}


def save(path, value=1, **options):
    return ckpt.save(path, state(value), comm=None, **options)


def load(path, **options):
    out = state(-1)
    ckpt.load(path, out, **options)
    assert (out["x"] == out["s"]).all()
    return int(out["s"])


def test_a_copy_is_the_same_files_and_reads_as_a_checkpoint(tmp_path, place):
    path = save(tmp_path / "home" / "step-7", 7, copies=[place])
    copy = absolute(place) / "step-7"
    assert names(place) == [LATEST_NAME, "step-7"]
    assert names(str(copy)) == names(path) == ["index.h5", "manifest.jsonl", "rank-00000.h5"]
    assert all((copy / name).read() == (path / name).read_bytes() for name in names(path))
    assert (copy.parent / LATEST_NAME).read() == b"step-7\n"
    assert ckpt.latest(place) == ckpt.find(place) == copy and ckpt.verify(str(copy)) == []
    (found,) = ckpt.list_checkpoints(place)
    assert (found.path, found.name, found.step, found.complete) == (copy, "step-7", 7, True)
    assert found.nbytes == ckpt.list_checkpoints(tmp_path / "home")[0].nbytes
    checkpoint = ckpt.open(str(copy))
    assert checkpoint.path == copy and (checkpoint["x"][3:5, 1:] == 7).all()
    assert load(copy) == load(str(copy)) == load(copy, verify=False) == 7


@pytest.mark.parametrize("files", ["rank", "one", 2])
@pytest.mark.parametrize("background", [False, True])
def test_ranks_copy_the_files_they_made_and_any_number_loads_them(tmp_path, place, files, background):
    x = np.arange(3 * 50.0).reshape(50, 3)

    def act(comm):
        low, high = (50 * r // comm.size for r in (comm.rank, comm.rank + 1))
        shard = ckpt.Shard(x[low:high].copy(), x.shape, (low, 0))
        others = {"s": np.array(5), "bias": np.arange(1000)}
        ckpt.save(tmp_path / "home" / "a", {"x": shard, **others}, comm=comm, files=files, copies=[place])
        comm.barrier()
        out = ckpt.Shard(np.zeros_like(shard.data), x.shape, (low, 0))
        ckpt.load(absolute(place) / "a", {"x": out}, comm=comm, strict=False)
        assert np.array_equal(out.data, shard.data)

    if background:
        save(tmp_path / "home" / "a", 5, copies=[place], background=True)
        ckpt.wait()
    else:
        on_ranks(3, act)
    assert ckpt.verify(str(absolute(place) / "a")) == []
    assert names(str(absolute(place) / "a")) == names(tmp_path / "home" / "a")


def test_keep_counts_in_each_place(tmp_path, place):
    for step in range(1, 5):
        save(tmp_path / "home" / f"step-{step}", step, copies=[place], keep=2)
    assert names(place) == names(tmp_path / "home") == [LATEST_NAME, "step-3", "step-4"]


def test_a_name_that_exists_in_a_place_is_kept_or_replaced(tmp_path, place):
    save(tmp_path / "home" / "a", 1, copies=[place])
    shutil.rmtree(tmp_path / "home")
    with pytest.warns(
        RuntimeWarning, match=r"the copy .*/a was not made: .*pass overwrite=True.*; the checkpoint .* stands"
    ):
        save(tmp_path / "home" / "a", 2, copies=[place])
    assert load(tmp_path / "home" / "a") == 2 and load(absolute(place) / "a") == 1
    save(tmp_path / "home" / "a", 3, copies=[place], overwrite=True)
    assert load(tmp_path / "home" / "a") == load(absolute(place) / "a") == 3
    assert names(place) == ["a", LATEST_NAME]


def test_a_new_home_goes_on_counting_where_the_copies_are(tmp_path, place):
    for step in (1, 2, 3):
        save(tmp_path / "home" / f"step-{step}", step, copies=[place], keep=2)
    shutil.rmtree(tmp_path / "home")  # the disk was lost
    assert ckpt.latest(tmp_path / "home") is None
    assert ckpt.latest(tmp_path / "home", copies=[place]) == absolute(place) / "step-3"
    save(tmp_path / "home" / "step-4", 4, copies=[place], keep=2)
    assert ckpt.latest(place) == absolute(place) / "step-4"
    assert names(place) == [LATEST_NAME, "step-3", "step-4"]
    # equally new: the one at home
    assert ckpt.latest(tmp_path / "home", copies=[place]) == tmp_path / "home" / "step-4"
    (tmp_path / "home" / "step-4" / "index.h5").unlink()
    assert ckpt.latest(tmp_path / "home", copies=[place]) == absolute(place) / "step-4"


# Places that fail


def test_a_place_that_cannot_be_is_a_warning(tmp_path, place):
    """A file where the folder should be: what a read-only place is to others, it is to the superuser, too."""
    if place.startswith("memory"):
        pytest.skip("it knows no such errors")
    (tmp_path / "copy").write_text("a file")
    with pytest.warns(
        RuntimeWarning, match=r"the copy .*copy/a was not made: .*copy.*; the checkpoint .*home/a stands"
    ):
        save(tmp_path / "home" / "a", 1, copies=[place, tmp_path / "good"])
    assert load(tmp_path / "home" / "a") == load(tmp_path / "good" / "a") == 1
    assert (tmp_path / "copy").read_text() == "a file"


@pytest.mark.parametrize("background", [False, True])
def test_a_place_that_fills_up_is_a_warning_and_keeps_nothing(tmp_path, place, background, monkeypatch):
    """A limit on the size of files stands for a full disk. It begins when the checkpoint is complete: only the copy meets it."""
    if place.startswith("memory"):
        pytest.skip("it is no file")
    new = place.replace("/copy", "/new/deep")  # a place of which the copy would make the folders
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    plain = copying.make_copies

    def on_a_full_disk(*args, **kwargs):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        plain(*args, **kwargs)

    save(tmp_path / "home" / "step-1", 1, copies=[place])
    monkeypatch.setattr("ckpt.saving.save.make_copies", on_a_full_disk)

    def fill():
        tensors = {"x": np.ones(1 << 17)}
        ckpt.save(tmp_path / "home" / "step-2", tensors, comm=None, copies=[place, new], keep=1, background=background)
        ckpt.wait()

    try:
        with (
            pytest.warns(
                RuntimeWarning, match=r"the copy .*copy/step-2 was not made: .*File too large.*rank-00000\.h5"
            ),
            pytest.warns(RuntimeWarning, match=r"the copy .*new/deep/step-2 was not made: .*File too large"),
        ):
            fill()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert ckpt.verify(tmp_path / "home" / "step-2") == [] and names(tmp_path / "home") == [LATEST_NAME, "step-2"]
    assert names(place) == [LATEST_NAME, "step-1"] and load(absolute(place) / "step-1") == 1
    assert names(tmp_path) == ["copy", "home"], "no empty folder is left"


def test_a_checkpoint_that_another_save_removes_while_it_is_copied(tmp_path, monkeypatch):
    """One warning for all places, and none that says it stands."""
    plain = copying._Copy._transfer

    def meanwhile(copy):
        shutil.rmtree(tmp_path / "home" / "step-1", ignore_errors=True)
        plain(copy)

    monkeypatch.setattr(copying._Copy, "_transfer", meanwhile)
    monkeypatch.setattr(local, "_VISIBLE_S", 0.2)  # what is gone does not appear, however long one waits
    with pytest.warns(RuntimeWarning) as told:
        save(tmp_path / "home" / "step-1", copies=[tmp_path / "one", tmp_path / "two"])
    assert [str(warning.message) for warning in told] == [
        f"{tmp_path / 'home' / 'step-1'} was not copied: another save that keeps fewer checkpoints has removed it"
    ]
    assert names(tmp_path) == ["home"]


def test_a_copy_that_reads_back_otherwise_is_not_published(tmp_path, monkeypatch):
    plain = LocalPath.upload

    def rotten(target, source):
        plain(target, source)
        if target.name == "rank-00000.h5":
            flip_bit(target.parent / "rank-00000.h5")

    monkeypatch.setattr(LocalPath, "upload", rotten)
    with pytest.warns(
        RuntimeWarning, match=r"was not made: reading it back: rank-00000\.h5, bytes .*checksum does not match"
    ):
        save(tmp_path / "home" / "a", copies=[tmp_path / "copy"])
    assert names(tmp_path) == ["home"], "nor is the folder left that was made for it"


def test_one_rank_that_cannot_copy_speaks_for_all(tmp_path, monkeypatch):
    plain = LocalPath.upload

    def full(target, source):
        if target.name == "rank-00001.h5":
            raise OSError(28, "No space left on device", str(target))
        plain(target, source)

    monkeypatch.setattr(LocalPath, "upload", full)

    def act(comm):
        shard = ckpt.Shard(np.ones((4, 2)), (8, 2), (4 * comm.rank, 0))
        ckpt.save(tmp_path / "home" / "a", {"x": shard}, comm=comm, copies=[tmp_path / "copy"])

    with pytest.warns(RuntimeWarning, match=r"No space left on device.*rank-00001\.h5' \[rank 1 of 2\]") as caught:
        on_ranks(2, act)
    assert len(caught) == 1 and names(tmp_path) == ["home"] and ckpt.verify(tmp_path / "home" / "a") == []


@pytest.mark.parametrize(
    ("copies", "error", "message"),
    [
        ("/scratch", TypeError, "expected a list of folders and URLs"),
        ([1], TypeError, "expected a list of folders and URLs"),
        (["HOME"], ValueError, "which is named twice, or is the checkpoint's folder"),
        (["HOME/../other", "HOME/../other"], ValueError, "expected further places"),
        (["memory://"], ValueError, "memory://, which has no path"),
        (["nonsense://bucket"], ValueError, "nonsense://bucket cannot be reached: Protocol not known"),
    ],
)
def test_copies_that_cannot_be_asked_for(tmp_path, copies, error, message):
    if isinstance(copies, list):
        copies = [str(c).replace("HOME", str(tmp_path / "home")) if isinstance(c, str) else c for c in copies]
    with pytest.raises(error, match=message):
        save(tmp_path / "home" / "a", copies=copies)
    assert names(tmp_path) == []
    with pytest.raises(ValueError, match="path is memory://bucket/a; expected a folder"):
        save("memory://bucket/a")


KILLED = """
import os, signal, sys
import numpy as np
import ckpt
from ckpt.saving import copies

home, place, step = sys.argv[1:]
def die(self):
    print("dying", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

copies._Copy._read_back = die
ckpt.save(f"{home}/{step}", {"x": np.full((40, 3), 2.0), "s": np.array(2)}, comm=None, copies=[place])
"""


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["", "local://"])
def test_a_job_killed_while_it_copies_leaves_no_half_copy(tmp_path, kind):
    home, place = tmp_path / "home", f"{kind}{tmp_path / 'copy'}"
    save(home / "a", 1, copies=[place])
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(home), place, "b"],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(Path(ckpt.__file__).parents[1])}, timeout=100,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "dying\n"), done.stderr
    assert load(home / "b") == 2
    assert ckpt.latest(place) == absolute(place) / "a"
    with pytest.raises(ckpt.CheckpointError, match=r"does not exist|has no manifest\.jsonl"):
        ckpt.open(str(absolute(place) / "b"))
    save(home / "c", 3, copies=[place])  # and the next job clears up
    assert names(place) == ["a", "c", LATEST_NAME]


def test_a_checkpoint_that_another_save_removes_before_it_is_copied(tmp_path, monkeypatch):
    plain = copying.make_copies

    def later(*args, **kwargs):
        monkeypatch.undo()
        save(tmp_path / "home" / "step-2", 2, keep=1)
        plain(*args, **kwargs)

    monkeypatch.setattr("ckpt.saving.save.make_copies", later)
    with pytest.warns(RuntimeWarning, match=r"home/step-1 was not copied: another save that keeps fewer checkpoints"):
        save(tmp_path / "home" / "step-1", 1, keep=1, copies=[tmp_path / "copy"])
    assert names(tmp_path / "home") == [LATEST_NAME, "step-2"]


# Loading


def test_a_damaged_primary_is_replaced_by_the_next_good_copy(tmp_path, place):
    path = save(tmp_path / "home" / "a", 1, copies=[tmp_path / "second", place])
    flip_bit(path / "rank-00000.h5")
    flip_bit(tmp_path / "second" / "a" / "rank-00000.h5")
    with pytest.raises(ckpt.CheckpointError, match="damaged"):
        load(path)
    with pytest.warns(RuntimeWarning) as caught:
        assert load(path, copies=[tmp_path / "second", place]) == 1
    assert [str(w.message).count("rank-00000.h5 is damaged: bytes") for w in caught] == [1, 1]
    assert f"going on with the copy {tmp_path / 'second' / 'a'}" in str(caught[0].message)
    # lost entirely
    shutil.rmtree(path)
    with pytest.warns(RuntimeWarning, match="home/a does not exist; going on with the copy"):
        assert load(path, copies=[place]) == 1
    opened = ckpt.open(path, copies=[tmp_path / "third", place])
    assert opened.path == absolute(place) / "a" and (opened["x"][:] == 1).all()
    with pytest.raises(ckpt.CheckpointError, match=r"none of 2 copies .*home/a does not exist; .*third/a does not"):
        ckpt.open(path, copies=[tmp_path / "third"])
    # a copy's own path works with the same list
    assert load(absolute(place) / "a", copies=[tmp_path / "second", place]) == 1


def test_all_damaged_is_an_error_that_names_all(tmp_path, place):
    path = save(tmp_path / "home" / "a", 1, copies=[tmp_path / "second"])
    flip_bit(path / "manifest.jsonl")
    (tmp_path / "second" / "a" / "rank-00000.h5").unlink()
    message = (
        r"none of 3 copies .*home/a: the manifest cannot .*second/a: rank-00000.h5 is missing.*copy/a does not exist"
    )
    with pytest.warns(RuntimeWarning), pytest.raises(ckpt.CheckpointError, match=message):
        load(path, copies=[tmp_path / "second", place])


def test_what_does_not_fit_is_no_damage(tmp_path):
    path = save(tmp_path / "home" / "a", 1, copies=[tmp_path / "copy"])
    with pytest.raises(ckpt.CheckpointError, match="does not hold 'y'"):
        ckpt.load(path, {"y": np.zeros(1)}, copies=[tmp_path / "copy"])


@pytest.mark.parametrize("harm", ["spoil", "unlink"])
def test_another_save_of_the_same_name_is_no_copy(tmp_path, harm):
    save(tmp_path / "home" / "a", 1, copies=[tmp_path / "copy"])
    path = save(tmp_path / "home" / "a", 2, overwrite=True)
    if harm == "spoil":
        flip_bit(path / "rank-00000.h5")
    else:
        (path / "rank-00000.h5").unlink()
    with pytest.warns(RuntimeWarning), pytest.raises(ckpt.CheckpointError, match="copy/a is from another save"):
        load(path, copies=[tmp_path / "copy"])


def test_rank_0_says_which_places(tmp_path):
    def act(comm):
        copies = [tmp_path / "copy"] if comm.rank == 0 else None
        path = ckpt.save(tmp_path / "home" / "a", {"x": np.ones(3), "y": np.ones(4)}, comm=comm, copies=copies)
        comm.barrier()
        if comm.rank == 1:
            (path / "rank-00001.h5").unlink()
        comm.barrier()
        out = {"x": np.zeros(3), "y": np.zeros(4)}
        ckpt.load(path, out, comm=comm, copies=copies)
        return out["x"].sum()

    with pytest.warns(RuntimeWarning, match="going on"):
        assert on_ranks(2, act) == [3, 3]


def test_ranks_go_on_to_the_copy_together(tmp_path, place):
    x = np.arange(24.0).reshape(8, 3)

    def act(comm):
        low = 4 * comm.rank
        ckpt.save(
            tmp_path / "home" / "a",
            {"x": ckpt.Shard(x[low : low + 4].copy(), x.shape, (low, 0))},
            comm=comm,
            copies=[place],
        )
        comm.barrier()
        if comm.rank == 1:
            flip_bit(tmp_path / "home" / "a" / "rank-00001.h5")
        comm.barrier()
        out = np.zeros((4, 3))
        ckpt.load(tmp_path / "home" / "a", {"x": ckpt.Shard(out, x.shape, (low, 0))}, comm=comm, copies=[place])
        return out

    with pytest.warns(RuntimeWarning, match=r"rank-00001.h5 is damaged.*\[rank 1 of 2\]; going on") as caught:
        assert np.array_equal(np.concatenate(on_ranks(2, act)), x)
    assert len(caught) == 1
