"""What is no checkpoint, or has more in it than a save made, belongs to somebody: nobody replaces or removes it."""

import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from checkpoints import printed, save
from safetensors.numpy import save_file

import ckpt
from ckpt.cli import main
from ckpt.commit import atomic, leftovers, retention
from ckpt.storage.catalog import LATEST_NAME


def tree(folder):
    """All that lies there, with its bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def a_folder(path):
    path.mkdir()
    (path / "thesis.tex").write_text("years")


def a_run(path):
    save(path / "step-1")


def a_checkpoint_with_notes(path):
    save(path)
    (path / "notes.txt").write_text("the good one")


def a_checkpoint_with_a_folder(path):
    save(path)
    (path / "rank-00001.h5").mkdir()


def a_data_set(path):
    path.mkdir()
    (path / "manifest.jsonl").write_text('{"audio": "1.wav"}\n')
    (path / "part-00000.h5").write_bytes(b"waves")


def a_file(path):
    path.write_text("years")


def a_dead_link(path):
    path.symlink_to(path.parent / "nowhere")


def test_a_data_set_is_no_checkpoint(tmp_path):
    a_data_set(tmp_path / "a")
    (tmp_path / "a" / "part-00000.h5").rename(tmp_path / "a" / "waves.h5")
    assert ckpt.list_checkpoints(tmp_path) == [] and ckpt.latest(tmp_path) is None


FOREIGN = [a_folder, a_run, a_checkpoint_with_notes, a_checkpoint_with_a_folder, a_data_set, a_file, a_dead_link]


@pytest.mark.parametrize("make", FOREIGN)
def test_only_checkpoints_are_replaced(tmp_path, make, capsys):
    source = save(tmp_path / "source", 7)
    save_file({"x": np.ones(3)}, tmp_path / "x.safetensors")
    make(tmp_path / "a")
    before, status = tree(tmp_path), os.lstat(tmp_path / "a")
    for act in (
        lambda: save(tmp_path / "a", overwrite=True),
        lambda: save(tmp_path / "a"),  # nor is it said that overwrite=True would help
        lambda: ckpt.reshard(source, tmp_path / "a", files=1, overwrite=True),
        lambda: ckpt.import_file(tmp_path / "x.safetensors", tmp_path / "a", overwrite=True),
    ):
        with pytest.raises(FileExistsError, match=r"this path (is|holds|has) .*; a save replaces only"):
            act()
    assert main(["reshard", str(source), str(tmp_path / "a"), "--files", "1", "--overwrite"]) == 2
    assert main(["import", str(tmp_path / "x.safetensors"), str(tmp_path / "a"), "--overwrite"]) == 2
    assert capsys.readouterr().err.count("a save replaces only a checkpoint without foreign files") == 2
    assert tree(tmp_path) == before and os.lstat(tmp_path / "a").st_ino == status.st_ino


@pytest.mark.parametrize("scheme", ["", "local://"])
@pytest.mark.parametrize("make", [a_folder, a_checkpoint_with_notes, a_checkpoint_with_a_folder, a_data_set])
def test_nor_in_further_places(tmp_path, make, scheme):
    (tmp_path / "copy").mkdir()
    make(tmp_path / "copy" / "a")
    before = tree(tmp_path / "copy" / "a")
    with pytest.warns(RuntimeWarning, match="copy/a was not made: .*this path"):
        save(tmp_path / "home" / "a", copies=[f"{scheme}{tmp_path}/copy"], overwrite=True)
    assert tree(tmp_path / "copy" / "a") == before


def test_the_current_folder_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="path is empty; expected a folder"):
        save("", overwrite=True)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: [file.unlink() for file in path.iterdir()],  # an empty folder
        lambda path: (path / "manifest.jsonl").unlink(),
        lambda path: (path / "manifest.jsonl").write_bytes(b"{}"),
        lambda path: (path / "index.h5").unlink(),
        lambda path: (path / "rank-00000.h5").unlink(),
        lambda path: (path / ".nfs0000a1").write_bytes(b"removed, and open somewhere"),
        lambda path: (path / ".owner").write_bytes(b"a save that could not clear up"),
    ],
)
def test_damaged_checkpoints_are_replaced(tmp_path, spoil):
    path = save(tmp_path / "a", 1)
    spoil(path)
    with pytest.raises(FileExistsError, match="pass overwrite=True"):
        save(path, 2)
    save(path, 2, overwrite=True)
    assert (ckpt.open(path)["x"][:] == 2).all() and sorted(os.listdir(tmp_path)) == ["a", LATEST_NAME]


def test_an_old_checkpoint_with_more_in_it_stays(tmp_path):
    a_checkpoint_with_notes(tmp_path / "step-1")
    with pytest.warns(RuntimeWarning, match=r"step-1 could not be removed: .*it holds 'notes.txt', which no save made"):
        save(tmp_path / "step-2", keep=1)
    assert ckpt.latest(tmp_path) == tmp_path / "step-2" and ckpt.open(tmp_path / "step-1")["x"][0] == 1
    (tmp_path / "step-1" / "notes.txt").unlink()
    save(tmp_path / "step-3", keep=1)
    assert sorted(os.listdir(tmp_path)) == [LATEST_NAME, "step-3"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_link_to_a_checkpoint_is_replaced_and_what_it_leads_to_stays(tmp_path, exchanges, monkeypatch, capsys):
    if not exchanges:
        monkeypatch.setattr(atomic, "_exchange", lambda a, b: False)
    real = save(tmp_path / "elsewhere" / "real", 1)
    runs = tmp_path / "runs"
    for value in (2.0, 3.0):
        runs.mkdir(exist_ok=True)
        (runs / "step-2").symlink_to(real)
        save(runs / "step-1", value, overwrite=True)
        save(runs / "step-2", value, overwrite=True)
        assert sorted(os.listdir(runs)) == [LATEST_NAME, "step-1", "step-2"]
        assert not (runs / "step-2").is_symlink() and ckpt.open(runs / "step-2")["x"][0] == value
        retention.remove(runs / "step-2")
    (runs / "step-0").symlink_to(real)
    printed(capsys, "gc", runs, "--keep", "1")
    assert ckpt.open(real)["x"][0] == 1
    assert sorted(os.listdir(runs)) in ([LATEST_NAME, "step-0"], [LATEST_NAME, "step-1"])


def test_links_that_are_left_over_go(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(leftovers, "QUIET_S", 0.0)
    real = save(tmp_path / "elsewhere" / "real", 1)
    (tmp_path / "runs").mkdir()
    for name in (".step-1.staging", ".step-1.removed", ".step-1.staging.removed", ".step-1.board"):
        (tmp_path / "runs" / name).symlink_to(real)
    (tmp_path / "runs" / ".step-2.staging").symlink_to(tmp_path / "nowhere")
    out = printed(capsys, "gc", tmp_path / "runs")
    assert len(re.findall(r"\.step-\S+ +removed +0 B ", out)) == 5 and out.endswith("freed 0 B\n")
    assert os.listdir(tmp_path / "runs") == [] and ckpt.verify(real) == []


@pytest.mark.parametrize("make", [a_checkpoint_with_notes, a_checkpoint_with_a_folder, a_data_set])
@pytest.mark.parametrize("option", [["--keep", "1"], ["--incomplete"], ["--keep", "1", "--incomplete"]])
def test_gc_leaves_what_has_more_in_it(tmp_path, make, option, capsys):
    make(tmp_path / "step-1")
    if make is not a_data_set:
        (tmp_path / "step-1" / "rank-00000.h5").unlink()
    save(tmp_path / "step-2")
    before = tree(tmp_path)
    steps = json.loads(printed(capsys, "gc", tmp_path, *option, "--dry-run", "--json"))["steps"]
    assert all((step["action"], step["path"]) == ("keep", str(tmp_path / "step-1")) for step in steps)
    assert len(steps) == (0 if make is a_data_set and "--incomplete" not in option else 1)
    assert printed(capsys, "gc", tmp_path, *option).endswith("nothing to remove\n")
    assert tree(tmp_path) == before


@pytest.fixture
def ordinary():
    """The folder of a user for whom permissions count, which this process is meanwhile."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    folder = Path(tempfile.mkdtemp())
    try:
        yield folder
    finally:
        for path in [folder, *folder.rglob("*/")]:
            path.chmod(0o700)
        os.seteuid(before)
        shutil.rmtree(folder)


def test_what_is_write_protected_stays_and_stands_in_no_way(ordinary, capsys):
    path = save(ordinary / "step-1", 1)
    path.chmod(0o555)
    before = tree(ordinary)
    for _ in range(3):
        with pytest.raises(FileExistsError, match=r"this path is write-protected; .*step-1"):
            save(path, 2, overwrite=True)
        assert tree(ordinary) == before
    with pytest.warns(RuntimeWarning, match="step-1 could not be removed: .*it is write-protected"):
        save(ordinary / "step-2", keep=1)
    out = printed(capsys, "gc", ordinary, "--keep", "1")
    assert re.search(r"step-1 +kept .* older than the newest one, but is write-protected", out)
    assert out.endswith("nothing to remove\n")
    path.chmod(0o755)
    printed(capsys, "gc", ordinary, "--keep", "1")
    assert sorted(os.listdir(ordinary)) == [LATEST_NAME, "step-2"]


def test_what_cannot_be_removed_is_not_said_to_be(ordinary, capsys):
    """A save that died, in a folder that is write-protected since."""
    save(ordinary / "step-2", 1)
    stuck = save(ordinary / "step-1", 1).rename(ordinary / ".step-1.removed")
    stuck.chmod(0o555)
    assert main(["gc", str(ordinary)]) == 2
    out, err = capsys.readouterr()
    assert re.search(r"\.step-1\.removed +kept .*half removed, but cannot be removed", out) and "freed" not in out
    assert f"could not be removed, or not all of it: {stuck}" in err
    save(ordinary / "step-1", 3)
    with pytest.warns(RuntimeWarning, match=r"step-1 could not be removed: .*\.step-1\.removed"):
        save(ordinary / "step-3", keep=1)
    assert sorted(os.listdir(ordinary)) == [".step-1.removed", LATEST_NAME, "step-1", "step-3"]


def test_nothing_is_put_into_a_checkpoint(tmp_path, monkeypatch):
    path = save(tmp_path / "a", 1)
    (tmp_path / "link").symlink_to(path)
    before = tree(path)
    for out in ("a", "a/index.h5", "a/x.h5", "a/x.npz", "a/sub/x.pt", "a/sub", "link/x.h5"):
        with pytest.raises(ValueError, match="a checkpoint, in which nothing is ever changed; expected another place"):
            ckpt.export(path, tmp_path / out, overwrite=True)
    for act in (
        lambda: save(path / "b", overwrite=True),
        lambda: save(path / "index.h5", overwrite=True),
        lambda: ckpt.reshard(path, path / "sub" / "b", files=1),
    ):
        with pytest.raises(ValueError, match=f"{path}, a checkpoint|{path} is a checkpoint"):
            act()
    for place in (path, path / "sub", tmp_path / "link"):
        with pytest.raises(ValueError, match="which is the checkpoint or lies in it; expected further places"):
            save(path, 2, copies=[place], overwrite=True)
    for place in (path, f"local://{path}"):
        with pytest.warns(
            RuntimeWarning, match="a/b was not made: .*a is a checkpoint, in which nothing is ever changed"
        ):
            save(tmp_path / "b", 2, copies=[place], overwrite=True)
    assert tree(path) == before and sorted(os.listdir(tmp_path)) == ["a", "b", LATEST_NAME, "link"]


def test_an_export_beside_somebody_s_manifest(tmp_path):
    path = save(tmp_path / "a", 1)
    a_data_set(tmp_path / "data")
    assert ckpt.export(path, tmp_path / "data" / "x.npz") == [tmp_path / "data" / "x.npz"]
