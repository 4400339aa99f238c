"""Remote places: what is read of them and when, what goes wrong there, and uploads that somebody did not end."""

import json
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from checkpoints import names, save

import ckpt
from ckpt.cli import main
from ckpt.commit import retention
from ckpt.commit.owner import start_time
from ckpt.commit.upload import Upload
from ckpt.storage import remote
from ckpt.storage.catalog import LATEST_NAME
from ckpt.storage.remote import Url


def test_a_remote_file_is_fetched_ahead_only_where_it_is_read_on(tmp_path, monkeypatch):
    data = np.random.default_rng(0).bytes(1 << 20)
    (tmp_path / "file").write_bytes(data)
    monkeypatch.setattr(remote, "_REQUEST_BYTES", 3000)
    monkeypatch.setattr(remote, "_AHEAD_BYTES", 50_000)
    asked = []
    plain = Url.read
    monkeypatch.setattr(Url, "read", lambda self, *at: (asked.append(at), plain(self, *at))[1])
    file = remote.RemoteFile(Url(f"local://{tmp_path}/file"))

    def read(position, nbytes):
        memory = bytearray(nbytes)
        count = file.read_into(memoryview(memory), position)
        assert memory[:count] == data[position : position + nbytes]
        return count

    assert [read(at, 1000) for at in (5000, 200, 9000)] == [1000] * 3
    assert asked == [(5000, 6000), (200, 1200), (9000, 10_000)]
    asked.clear()
    assert [read(at, 1000) for at in range(10_000, 30_000, 1000)] == [1000] * 20
    assert asked == [(10_000, 12_000), (12_000, 16_000), (16_000, 24_000), (24_000, 40_000)]
    assert read(0, len(data)) == len(data) == file.nbytes
    assert max(last - first for first, last in asked) == 50_000
    assert (read(len(data) - 10, 1000), read(len(data), 5)) == (10, 0)


@pytest.mark.parametrize("missing", ["fsspec", "s3fs"])
def test_a_missing_package_is_named(tmp_path, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ValueError, match=r"s3://bucket cannot be reached: .*pip install 'mpitrain\[remote\]'"):
        save(tmp_path / "home" / "a", copies=["s3://bucket"])
    assert names(tmp_path) == []


def test_files_behind_a_url_are_a_folder_like_any_other(tmp_path):
    save(tmp_path / "home" / "a", copies=[f"file://{tmp_path}/copy"])
    assert ckpt.latest(f"file://{tmp_path}/copy") == tmp_path / "copy" / "a"


def test_a_place_that_is_away_does_not_keep_a_job_from_home(tmp_path):
    path = save(tmp_path / "home" / "a")
    (tmp_path / "copy").symlink_to("copy")  # a folder that cannot be looked at, not even by the superuser
    with pytest.warns(RuntimeWarning, match="no copy is looked for in local://.*/copy: "):
        assert ckpt.latest(tmp_path / "home", copies=[f"local://{tmp_path}/copy"]) == path


def test_uploads_of_the_dead_are_removed_those_of_the_living_are_not(tmp_path):
    place = Url(f"local://{tmp_path / 'copy'}")
    living = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        here = {"host": socket.gethostname(), "token": "t", "begun": time.time()}
        start = start_time(living.pid)
        uploads = {
            "dead": here | {"pid": 2**30, "start": "1"},
            "reused": here | {"pid": living.pid, "start": "1"},
            "living": here | {"pid": living.pid, "start": start},
            "elsewhere": here | {"host": "another-host", "pid": 1, "start": "1"},
            "forgotten": here | {"host": "another-host", "pid": 1, "start": "1", "begun": time.time() - 1e6},
        }
        for name, owner in uploads.items():
            (place / name).make()
            (place / name / ".owner").write(json.dumps(owner).encode())
            (place / name / "rank-00000.h5").write(b"half")
        save(tmp_path / "home" / "a", copies=[str(place)])
        assert names(place) == ["a", "elsewhere", LATEST_NAME, "living"]
        assert ckpt.latest(place) == place / "a"
        # its own name: what another host left is taken over, a living process's is not
        save(tmp_path / "home" / "elsewhere", copies=[str(place)])
        with pytest.warns(RuntimeWarning, match=f"process {living.pid} is writing this checkpoint"):
            save(tmp_path / "home" / "living", copies=[str(place)])
        assert (
            sorted(names(place / "living")) == [".owner", "rank-00000.h5"]
            and names(place / "elsewhere")[0] == "index.h5"
        )
    finally:
        living.communicate(b"\n")


def test_what_is_no_checkpoint_is_left_alone(tmp_path):
    place = Url(f"local://{tmp_path / 'copy'}")
    (place / "a").make()
    (place / "a" / "thesis.tex").write(b"years")
    for overwrite in (False, True):
        with pytest.warns(RuntimeWarning, match="copy/a was not made: .*holds 'thesis.tex', which no save made"):
            save(tmp_path / "home" / "a", copies=[str(place)], overwrite=overwrite)
    assert names(place / "a") == ["thesis.tex"]


def test_a_removal_that_stopped_on_its_way_is_ended_by_the_next_job(tmp_path, monkeypatch):
    place = Url(f"local://{tmp_path / 'copy'}")
    save(tmp_path / "home" / "a", copies=[str(place)])
    plain, removed = Url.unlink, []

    def die(self):
        if len(removed) == 2:
            raise KeyboardInterrupt
        removed.append(self.name)
        plain(self)

    monkeypatch.setattr(Url, "unlink", die)
    with pytest.raises(KeyboardInterrupt):
        retention.remove(place / "a")
    monkeypatch.undo()
    assert removed[0] == "manifest.jsonl" and len(names(place / "a")) == 2 and ckpt.latest(place) is None
    save(tmp_path / "home" / "b", copies=[str(place)])
    assert names(place) == ["b", LATEST_NAME]


def test_an_upload_that_was_taken_over_is_not_published(tmp_path):
    final = Url(f"local://{tmp_path}/copy/a")
    first = Upload(final).open(overwrite=False)
    with pytest.raises(FileExistsError, match="another thread of this process is writing this checkpoint"):
        Upload(final).open(overwrite=False)
    (final / ".owner").write(b'{"host": "another-host", "pid": 1, "start": "1", "token": "t"}')
    with pytest.raises(FileExistsError, match="took this checkpoint over"):
        first.publish(b"first", overwrite=False)
    first.discard()
    assert final.names() == [".owner"], "it is the other job's now"


def test_a_place_that_cannot_be_asked_is_an_error_and_not_an_empty_one(tmp_path):
    """fsspec's own `exists` says no here: what cannot be seen would then be taken away, to be replaced."""
    (tmp_path / "file").write_text("a file")
    for ask in (Url.exists, Url.is_dir, Url.entries, Url.size, Url.read):
        with pytest.raises(OSError, match=f"local://{tmp_path}/file/a"):
            ask(Url(f"local://{tmp_path}/file/a"))
    nothing = Url(f"local://{tmp_path}/nothing")
    assert not nothing.exists() and not nothing.is_dir()
    assert Url(f"local://{tmp_path}").is_dir() and not Url(f"local://{tmp_path}/file").is_dir()
    with pytest.raises(FileNotFoundError, match=f"No such file or directory: '{nothing}'"):
        nothing.entries()
    nothing.unlink()
    nothing.remove_folder("a", "b")


@pytest.mark.parametrize("text", ["s3://bucket/run", "memory://", "local:///tmp/x"])
def test_a_url_is_taken_apart_as_a_path_is(text):
    url = Url(text)
    child = url / "step-1"
    assert child.name == "step-1" and child.parent == url == Url(text + "/") and hash(child.parent) == hash(url)
    assert str(url) == text


def test_commands_read_urls_and_change_nothing_there(tmp_path, capsys):
    home, place = tmp_path / "home", f"local://{tmp_path / 'copy'}"
    save(home / "step-1", copies=[place])

    def run(*args):
        try:
            code = main([str(arg) for arg in args])
        except SystemExit as refused:
            code = refused.code
        out, err = capsys.readouterr()
        return code, out or err

    (found,) = json.loads(run("ls", place, "--json")[1])
    assert (found["path"], found["step"], found["complete"]) == (f"{place}/step-1", 1, True)
    assert run("ls", f"{place}/step-1")[1].split()[6:9] == ["step-1", "1", "1"]
    assert "1 tensors, 40 B" in run("show", place)[1] and "x" in run("show", place, "x", "--stats")[1]
    assert run("verify", place) == (0, run("verify", home)[1].replace(str(home), place))
    assert run("diff", place, home) == (0, "no difference in 1 tensors\n")
    assert run("export", place, tmp_path / "x.npz")[0] == 0 and np.load(tmp_path / "x.npz")["x"].sum() == 5
    assert run("reshard", place, tmp_path / "again", "--files", 2)[0] == 0
    assert ckpt.open(tmp_path / "again")["x"][:].sum() == 5 and len(ckpt.open(tmp_path / "again").files) == 3

    for args in [("gc", place), ("reshard", home, f"{place}/b", "--files", 1), ("export", home, f"{place}/x.npz")]:
        code, said = run(*args)
        assert code == 2 and "is a URL; expected a path" in said, said
    assert run("verify", place, "--hdf5")[1].endswith("HDF5 opens no URLs, so copy the checkpoint to a disk first\n")
    code, said = run("show", "nonsense://bucket")
    assert code == 2 and "nonsense://bucket cannot be reached" in said
    code, said = run("show", f"{place}/nowhere")
    assert (code, said) == (2, f"ckpt: {place}/nowhere does not exist\n")
    with pytest.raises(ValueError, match=r"out is local://.*; expected a file or a folder"):
        ckpt.export(home / "step-1", f"{place}/x.npz")
    assert names(place) == [LATEST_NAME, "step-1"]
