"""What can be the path of a checkpoint, and what an open one says when another takes its place."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import ckpt
from ckpt.storage.local_path import LocalPath


def test_what_is_no_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tensors = {"x": np.zeros(3)}
    for call in (
        lambda path: ckpt.save(path, tensors, comm=None),
        lambda path: ckpt.load(path, tensors),
        ckpt.open,
        ckpt.latest,
        ckpt.verify,
        lambda path: ckpt.import_file(path, "a"),
        lambda path: ckpt.reshard(path, "a", files=1),
    ):
        with pytest.raises(
            TypeError, match=r"^b'path' is no path; expected a str, which os\.fsdecode makes of bytes, or"
        ):
            call(b"path")
        with pytest.raises(TypeError, match=r"^5 is no path; expected a str, or a pathlib\.Path"):
            call(5)
    assert os.listdir() == []


def test_a_path_at_home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    tensors = {"x": np.ones(3)}
    assert ckpt.save("~/run/a", tensors, comm=None, copies=["~/copy"]) == home / "run" / "a"
    ckpt.load("~/run/a", tensors)
    assert ckpt.latest(Path("~/run")) == home / "run" / "a" and ckpt.open("~/copy/a").path == home / "copy" / "a"
    ckpt.export("~/run/a", "~/a.safetensors")
    assert ckpt.import_file("~/a.safetensors", "~/run/b") == home / "run" / "b"
    ckpt.save("~nobody-is-called-so", tensors, comm=None)
    assert sorted(os.listdir()) == ["home", "latest", "~nobody-is-called-so"]
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    with pytest.raises(ValueError, match="'~/run/a' cannot be found: this user has no home"):
        ckpt.load("~/run/a", tensors)


def test_a_checkpoint_that_is_replaced_while_it_is_verified(tmp_path):
    """Its bytes are not those of the manifest that was read first, and are not damaged."""

    def save(value):
        return ckpt.save(tmp_path / "a", {"x": np.full(10, value)}, overwrite=True)

    def meanwhile(folder):
        return plain(LocalPath(save(2.0)))

    path, plain = save(1.0), LocalPath.open_folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalPath, "open_folder", meanwhile)
        with pytest.raises(ckpt.CheckpointError, match="a was replaced by another save while it was verified: verify"):
            ckpt.verify(path)
    assert ckpt.verify(path) == []


@pytest.mark.parametrize(
    "read",
    [
        lambda entry: entry.read(),
        lambda entry: list(entry.chunks()),
        lambda entry: entry.read(verify=False),
        lambda entry: list(entry.chunks(verify=False)),
    ],
)
def test_a_checkpoint_that_is_replaced_while_it_is_open(tmp_path, read):
    path = ckpt.save(tmp_path / "a", {"x": np.arange(3.0)}, comm=None)
    entry = ckpt.open(path)["x"]

    for value in (np.arange(3.0) + 1, np.zeros(30)):
        ckpt.save(path, {"x": value}, comm=None, overwrite=True)
        with pytest.raises(
            ckpt.CheckpointError, match=r"^/.*/a was replaced by another save since it was opened: open it"
        ):
            read(entry)
    shutil.rmtree(path)
    with pytest.raises(ckpt.CheckpointError, match=r"^/.*/a was removed since it was opened$"):
        read(entry)
