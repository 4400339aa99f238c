"""Checkpoints made to harm who opens them: refused in bounded time and memory, and without a crash.

First those that aim at our own reader, then those that aim at whatever else opens the HDF5 files.
"""

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import forging
import h5py
import numpy as np
import pytest
import xxhash
from forging import fit, forge, signed

import ckpt
from ckpt.check import audit, inspecting
from ckpt.commit import atomic
from ckpt.format.manifest import FILE_NAME, MAX_LINE_BYTES, MAX_SEQUENCE, MAX_SIZE
from ckpt.saving import describing
from ckpt.storage.catalog import read_manifest
from ckpt.storage.local_path import LocalPath

DATA, INDEX = "rank-00000.h5", "index.h5"
MAX_GROWN_BYTES = 64 << 20
MAX_SECONDS = 10


def plain(folder):
    """A checkpoint with a float32 matrix, an int64 scalar and an empty tensor."""
    tensors = {"m/w": np.arange(6, dtype=np.float32).reshape(3, 2), "m/s": np.array(7), "m/e": np.zeros((0, 2))}
    return ckpt.save(folder, tensors, comm=None, meta={"step": 3})


def lines(path):
    return (path / FILE_NAME).read_bytes().splitlines()[:-1]


def rewrite(path, *changes):
    """Exchange lines of the manifest: (number, line)."""
    all_lines = lines(path)
    for number, line in changes:
        all_lines[number] = line
    (path / FILE_NAME).write_bytes(signed(all_lines))


def header(path, **changes):
    forge(path, lambda header, meta, tensors: header.update(changes))


def file(path, **changes):
    forge(path, lambda header, meta, tensors: header["files"][0].update(changes))


def tensor(path, i=2, **changes):
    forge(path, lambda header, meta, tensors: tensors[i].update(changes))


def sparse(path, nbytes):
    with open(path, "r+b") as opened:
        opened.truncate(nbytes)


def instead(path, name, make):
    """`make(where, the file that was there)` in place of a file."""
    moved = path.parent / f"moved-{name}"
    (path / name).rename(moved)
    make(path / name, moved)


def spiral(n):
    """Strips, cut off an n x n square from two sides in turn: no plane but the outermost passes between them."""
    low, high, boxes = [0, 0], [n, n], []
    while len(boxes) < 2 * n - 1:
        axis = len(boxes) % 2
        shape = [high[d] - low[d] for d in range(2)]
        shape[axis] = 1
        boxes.append((list(low), shape))
        low[axis] += 1
    return boxes


def interlock(path):
    n, zero = 3000, f"{xxhash.xxh3_64_intdigest(b''):016x}"

    def edit(header, meta, tensors):
        start, blocks = 0, []
        for offset, shape in spiral(n):
            size = shape[0] * shape[1]
            chunks = -(-size * 4 // header["chunk_bytes"])
            blocks.append({"file": 0, "start": start, "offset": offset, "shape": shape, "xxh3": zero * chunks})
            start += size
        tensors[2] |= {"shape": [n, n], "blocks": blocks}
        header["files"][0] |= {"bytes": 8192 + 4 * start, "datasets": {"float32": [8192, start], "int64": [4096, 1]}}

    forge(path, edit)
    sparse(path / DATA, 8192 + 4 * n * n)


def terabytes(path):
    chunk, count = 16 << 20, 1 << 18
    digits = f"{xxhash.xxh3_64_intdigest(bytes(chunk)):016x}" * count

    def edit(header, meta, tensors):
        header["chunk_bytes"] = chunk
        size = chunk * count // 4
        header["files"][0] |= {"bytes": 8192 + 4 * size, "datasets": {"float32": [8192, size], "int64": [4096, 1]}}
        tensors[1]["blocks"][0]["start"] = 0
        block = {"file": 0, "start": 0, "offset": [0], "shape": [size], "xxh3": digits}
        tensors[2] |= {"shape": [size], "blocks": [block]}
        del tensors[1]
        header["tensors"] = 2

    forge(path, edit)
    sparse(path / DATA, 8192 + chunk * count)


def deep_axis(line):
    return line[:-1] + b',"axes":' + b"[" * 900 + b"]" * 900 + b',"more":"' + b"x" * 12_000 + b'"}'


HOSTILE = {
    "a manifest of a terabyte": (lambda p: sparse(p / FILE_NAME, 1 << 40), "expected at most"),
    "a manifest with a hole": (lambda p: sparse(p / FILE_NAME, 1 << 30), "zeros in it"),
    "a header of 100 MB": (lambda p: rewrite(p, (0, b'{"format":"' + b"a" * (100 << 20))), "a line of"),
    "a manifest of empty lines": (lambda p: rewrite(p, (1, b"\n" * (32 << 20))), "its header says 3"),
    "a deep header": (lambda p: rewrite(p, (0, b"[" * 400_000)), "no JSON"),
    "deep meta": (lambda p: rewrite(p, (1, b'{"a":' * 100_000 + b"1" + b"}" * 100_000)), "no JSON"),
    "meta of lists": (lambda p: rewrite(p, (1, b'{"a":[' + b"[]," * 2_000_000 + b"[]]}")), "values; expected at most"),
    "meta of one text": (lambda p: rewrite(p, (1, b'{"a":"' + b"\\ud83d\\ude00" * 2_000_000 + b'"}')), "a line of"),
    "meta of keys": (
        lambda p: rewrite(p, (1, b"{" + b",".join(b'"%x":%d' % (i, i + 300) for i in range(520_000)) + b"}")),
        "values; expected at most",
    ),
    "a tensor of lists": (
        lambda p: rewrite(p, (2, b'{"name":[' + b"[]," * 200_000 + b"[]]}")),
        "got `array` - at `$.name`",
    ),
    "a deep axis": (
        lambda p: rewrite(p, (4, deep_axis(lines(p)[4]))),
        "Expected `str | null`, got `array` - at `$.axes[0]`",
    ),
    "an endless integer": (lambda p: rewrite(p, (0, b'{"format":' + b"9" * 1_000_000 + b"}")), "no JSON"),
    "a time beyond floats": (lambda p: header(p, saved=10**400), "out of range - at `$.saved`"),
    "a time that is NaN": (lambda p: header(p, saved=float("nan")), "Expected `float` > -1e+300 - at `$.saved`"),
    "a key twice": (lambda p: rewrite(p, (1, b'{"a":1,"a":2}')), "a key appears twice"),
    "another encoding": (lambda p: rewrite(p, (1, '{"a":1}'.encode("utf-16"))), "zeros in it"),
    "a name of groups": (lambda p: tensor(p, name="a/" * 1_000_000 + "a"), "expected at most 1024"),
    "a name for terminals": (lambda p: tensor(p, name="m/\x1b]0;owned\x07"), "control character"),
    "a billion tensors": (lambda p: header(p, tensors=1 << 30), f"its header says {1 << 30}"),
    "chunks of a gibibyte": (lambda p: header(p, chunk_bytes=1 << 30), "chunk_bytes"),
    "chunks of nothing": (lambda p: header(p, chunk_bytes=0), "chunk_bytes"),
    "an empty tensor beyond arrays": (lambda p: tensor(p, 0, shape=[0, 1 << 62]), "no array can have the shape"),
    "a tensor larger than its file": (lambda p: tensor(p, shape=[1 << 30, 1 << 20]), "no rank holds element"),
    "interlocking blocks": (interlock, "interlock too much"),
    "a tensor of terabytes": (terabytes, "do not fit into memory"),
    "a data file of terabytes": (
        lambda p: (
            file(p, bytes=(1 << 42) + 8192, datasets={"float32": [8192, 1 << 40], "int64": [4096, 1]}),
            sparse(p / DATA, (1 << 42) + 8192),
        ),
        "belong to no tensor",
    ),
    "an index of terabytes": (lambda p: (sparse(p / INDEX, 1 << 42), forge_index_size(p)), "outside its datasets"),
    "a file elsewhere": (lambda p: file(p, name="../moved.h5"), "no plain name"),
    "a link as a data file": (lambda p: instead(p, DATA, Path.symlink_to), "links and devices"),
    "a link as the manifest": (lambda p: instead(p, FILE_NAME, Path.symlink_to), "cannot be read"),
    "a pipe as a data file": (lambda p: instead(p, DATA, lambda at, _: os.mkfifo(at)), "links and devices"),
    "a pipe as the manifest": (
        lambda p: instead(p, FILE_NAME, lambda at, _: os.mkfifo(at)),
        "is a pipe; expected a regular file",
    ),
    "a folder as the manifest": (
        lambda p: instead(p, FILE_NAME, lambda at, _: at.mkdir()),
        "is a folder; expected a regular file",
    ),
    "a device as a data file": (
        lambda p: instead(p, DATA, lambda at, _: at.symlink_to("/dev/zero")),
        "links and devices",
    ),
    "one file under two names": (
        lambda p: (
            forge(p, lambda header, *_: header["files"].append({**header["files"][0], "name": "b.h5"})),
            os.link(p / DATA, p / "b.h5"),
        ),
        "is the same file as",
    ),
}


def forge_index_size(path):
    forge(path, lambda header, *_: header["files"][1].update(bytes=1 << 42))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What came of each: [what, bytes grown, seconds]."""
    paths = []
    template = plain(tmp_path_factory.mktemp("plain") / "a")
    for number, (make, _) in enumerate(HOSTILE.values()):
        paths.append(shutil.copytree(template, tmp_path_factory.mktemp(f"hostile-{number}") / "a"))
        make(paths[-1])
    command = [sys.executable, Path(forging.__file__).with_name("hostile_child.py"), *map(str, paths)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return dict(zip(HOSTILE, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.rest
@pytest.mark.parametrize("name", HOSTILE)
def test_refused_in_bounded_time_and_memory(outcomes, name):
    what, grown_bytes, seconds = outcomes[name]
    assert what.startswith("refused: ") and HOSTILE[name][1] in what
    assert len(what) < 1000 and what.isprintable()
    assert grown_bytes < MAX_GROWN_BYTES and seconds < MAX_SECONDS


def test_a_part_of_a_sparse_tensor_can_be_read(tmp_path):
    path = plain(tmp_path / "a")
    terabytes(path)
    entry = ckpt.open(path)["m/w"]
    assert not entry[1 << 35 : (1 << 35) + 5].any()


@pytest.mark.rest
def test_what_no_reader_takes_is_not_saved(tmp_path):
    for meta in ({"a": "x" * MAX_LINE_BYTES}, {"a": [0] * (1 << 19)}):
        with pytest.raises(ValueError, match=r"meta is a line of .*save large values as tensors"):
            ckpt.save(tmp_path / "a", {}, comm=None, meta=meta)
    with pytest.raises(ValueError, match="has 1025 characters; expected at most 1024"):
        ckpt.save(tmp_path / "a", {"x" * 1025: np.zeros(2)}, comm=None)
    assert not list(tmp_path.iterdir())
    assert ckpt.open(ckpt.save(tmp_path / "a", {"x" * 1024: np.zeros(2)}, comm=None)).meta == {}


@pytest.mark.rest
@pytest.mark.parametrize("sequence", [MAX_SEQUENCE - 1, MAX_SEQUENCE, MAX_SEQUENCE + 1, MAX_SIZE - 1, MAX_SIZE])
@pytest.mark.parametrize("scheme", ["", "local://"])
def test_the_number_of_a_stranger_beside_it(tmp_path, sequence, scheme):
    """A checkpoint with an absurd number comes before all others; the next ones are complete, and the newest."""
    folder, copies = tmp_path / "runs", tmp_path / "copies"
    where = {"comm": None, "copies": [f"{scheme}{copies}"]}
    for step in (1, 2):
        ckpt.save(folder / f"step-{step}", {"x": np.ones(2)}, **where)
    for place in (folder, copies):
        header(place / "step-2", sequence=sequence)
    for step in (3, 4):
        path = ckpt.save(folder / f"step-{step}", {"x": np.full(2, step)}, **where)
        for place in (folder, copies):
            assert ckpt.open(place / path.name)["x"][0] == step and ckpt.latest(place).name == path.name
            assert ckpt.list_checkpoints(place)[-1].name == path.name
    again = ckpt.reshard(folder / "step-4", folder / "step-5", files=2, overwrite=True)
    assert ckpt.open(again)["x"][0] == 4
    if sequence > MAX_SEQUENCE:
        assert [found.name for found in ckpt.list_checkpoints(folder)] == [f"step-{i}" for i in (2, 1, 3, 4, 5)]
        ckpt.save(folder / "step-6", {}, keep=4, **where)
        assert sorted(os.listdir(folder)) == ["latest", *(f"step-{i}" for i in (3, 4, 5, 6))]


@pytest.mark.parametrize("background", [False, True])
def test_what_its_own_reader_refuses_is_not_saved(tmp_path, monkeypatch, background):
    monkeypatch.setattr(describing, "Manifest", partial(describing.Manifest, chunk_bytes=100))

    def save():
        ckpt.save(tmp_path / "a", {"x": np.ones(2)}, comm=None, background=background)
        ckpt.wait()

    with pytest.raises(ValueError, match=r"no reader would take this checkpoint, so it is not saved: .*chunk_bytes"):
        save()
    assert os.listdir(tmp_path) == []


@pytest.mark.rest
def test_a_folder_may_be_reached_by_a_link(tmp_path):
    path = plain(tmp_path / "a")
    (tmp_path / "b").symlink_to(path)
    assert ckpt.open(tmp_path / "b")["m/s"][()] == 7
    assert ckpt.verify(tmp_path / "b", hdf5=True) == []


# -- what aims at other tools


def replaced(index, make):
    del index["m/w"]
    make(index["m"])


def mapped(group, source, dataset=b"/float32", start=0, shape=(3, 2), dtype="<f4"):
    """m/w again, from elsewhere."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    target, there = h5py.h5s.create_simple(shape), h5py.h5s.create_simple((1000,))
    there.select_hyperslab((start,), (1,), block=(6,))
    target.select_hyperslab((0, 0), (1, 1), block=(3, 2))
    plist.set_virtual(target, source, dataset, there)
    h5py.h5d.create(group.id, b"w", h5py.h5t.py_create(np.dtype(dtype)), target, plist)


def pattern(group):
    """m/w, row by row from a file each, as many as there are."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    target, there = h5py.h5s.create_simple((3, 2), (h5py.h5s.UNLIMITED, 2)), h5py.h5s.create_simple((1, 2))
    target.select_hyperslab((0, 0), (h5py.h5s.UNLIMITED, 1), (1, 1), (1, 2))
    plist.set_virtual(target, b"/proc/rank-%b.h5", b"/float32", there)
    h5py.h5d.create(group.id, b"w", h5py.h5t.IEEE_F32LE, target, plist)


def external(group):
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_external(b"/etc/passwd", 0, 24)
    h5py.h5d.create(group.id, b"w", h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple((3, 2)), plist)


def linked(name, link):
    def edit(index):
        index[name] = link if isinstance(link, h5py.SoftLink | h5py.ExternalLink) else index[link]

    return edit


def in_place(make):
    return lambda index: replaced(index, make)


def referring(index):
    index["m"].attrs["see"] = index["m/w"].ref


STRAY = {
    "an external link": (
        in_place(lambda g: g.__setitem__("w", h5py.ExternalLink("/etc/x.h5", "/w"))),
        "'m/w': is a link to another file",
    ),
    "a soft link": (in_place(lambda g: g.__setitem__("w", h5py.SoftLink("/m/s"))), "'m/w': is a soft link"),
    "an extra link": (linked("m/more", h5py.ExternalLink("/etc/x.h5", "/w")), "holds 'more', which the manifest does"),
    "an extra dataset": (lambda index: index.create_dataset("more", data=[1]), "the group '/' holds 'more'"),
    "a cycle": (linked("m/up", "/m"), "holds 'up'"),
    "a tensor under two names": (
        in_place(lambda g: g.__setitem__("w", g["s"])),
        "stands under two names",
    ),
    "a missing tensor": (lambda index: index.__delitem__("m/e"), "'m/e': is missing"),
    "raw data elsewhere": (in_place(external), "'m/w': keeps its values in another file"),
    "a source elsewhere": (
        in_place(lambda g: mapped(g, b"/etc/rank-00000.h5")),
        "takes values from '/etc/rank-00000.h5'",
    ),
    "a source above": (in_place(lambda g: mapped(g, b"../a/rank-00000.h5")), "takes values from '../a/rank-00000.h5'"),
    "a source by a pattern": (in_place(pattern), "takes values from '/proc/rank-%b.h5'"),
    "another dataset": (in_place(lambda g: mapped(g, DATA.encode(), b"/int64")), "'int64'; expected"),
    "a source shifted": (in_place(lambda g: mapped(g, DATA.encode(), start=3)), "from another place"),
    "another shape": (in_place(lambda g: mapped(g, DATA.encode(), shape=(4, 2))), "has the shape (4, 2)"),
    "another type": (in_place(lambda g: mapped(g, DATA.encode(), dtype="<i4")), "has another type"),
    "plain values": (in_place(lambda g: g.create_dataset("w", (3, 2), "f4")), "is not virtual"),
    "a filter": (in_place(lambda g: g.create_dataset("w", (3, 2), "f4", compression="gzip")), "through a filter"),
    "a group": (in_place(lambda g: g.create_group("w")), "'m/w': is a group"),
    "a type": (in_place(lambda g: g.__setitem__("w", np.dtype("f4"))), "neither a group nor a dataset"),
    "a reference": (referring, "has the attribute b'see'"),
}


@pytest.mark.parametrize("name", STRAY)
def test_other_tools_are_warned(tmp_path, name):
    path = plain(tmp_path / "a")
    make, problem = STRAY[name]
    with h5py.File(path / INDEX, "r+") as index:
        make(index)
    fit(path, INDEX)
    # Ours does not care, and every byte is what the manifest says.
    assert ckpt.open(path)["m/w"].read().tolist() == [[0, 1], [2, 3], [4, 5]] and ckpt.verify(path) == []
    # What the child would say, in this process: these files are sound as such.
    folder = LocalPath(path)
    answers = audit.findings(folder, read_manifest(folder))
    (found,) = [(file, f"{tensor!r}: {what}") for file, tensor, what in answers if what]
    assert found[0] == INDEX and problem in found[1]


def test_a_data_file_is_looked_at_too(tmp_path):
    path = plain(tmp_path / "a")
    with h5py.File(path / DATA, "r+") as data:
        del data["int64"]
        data["int64"] = h5py.ExternalLink("/etc/x.h5", "/int64")
        data["more"] = 1
    fit(path, DATA)
    assert {(damage.file, damage.problem) for damage in ckpt.verify(path, hdf5=True)} >= {
        (DATA, "the group '/' holds 'more', which the manifest does not know"),
        (DATA, "is a link to another file"),
    }


def test_strangers_are_named(tmp_path):
    path = plain(tmp_path / "a")
    (path / "more.h5").write_bytes(b"")
    assert ckpt.look(path) == [("more.h5", None, "belongs to no checkpoint: the manifest does not name it")]


@pytest.mark.rest
@pytest.mark.parametrize("seed", range(3))
def test_what_hdf5_cannot_read_is_a_finding(tmp_path, seed):
    path = plain(tmp_path / "a")
    rng = np.random.default_rng(seed)
    data = bytearray((path / INDEX).read_bytes())
    for position in rng.integers(0, len(data), len(data) // 8):
        data[position] ^= 1 << int(rng.integers(8))
    (path / INDEX).write_bytes(data)
    fit(path, INDEX)
    assert {file for file, _, _ in ckpt.look(path)} == {INDEX}


@pytest.mark.rest
@pytest.mark.parametrize(
    ("child", "problem"),
    [
        ("print('[\"index.h5\", null, null]', flush=True)\nimport os\nos.abort()", "crashes on it: SIGABRT"),
        ("import time\ntime.sleep(60)", "was not done with it after 1 s"),
    ],
)
def test_a_crash_or_hang_of_hdf5_is_a_finding(tmp_path, monkeypatch, child, problem):
    path = plain(tmp_path / "a")
    monkeypatch.setattr(inspecting, "_CHILD", child)
    ((file, _, found),) = ckpt.look(path, timeout_s=1)
    assert file == INDEX and problem in found


def test_the_child_is_no_rank(tmp_path, monkeypatch):
    path = plain(tmp_path / "a")
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setattr(
        inspecting,
        "_CHILD",
        "import json, os\nprint(json.dumps(['a', None, ' '.join(sorted(os.environ))]), flush=True)",
    )
    ((_, _, names),) = ckpt.look(path)
    assert "HDF5_PLUGIN_PRELOAD" in names and "OMPI_" not in names and "PMI" not in names


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_files_of_saves_that_a_stranger_has_put_there(tmp_path, kind):
    """No save waits for them, or reads them to their end."""
    make = {"pipe": os.mkfifo, "device": lambda at: at.symlink_to("/dev/zero")}[kind]
    for name in (".step-1.staging", ".step-2.staging", ".step-9.board"):
        (tmp_path / name).mkdir()
        make(tmp_path / name / ".owner")
    make(tmp_path / "latest")
    for step in (1, 2, 3):
        ckpt.save(tmp_path / f"step-{step}", {"x": np.full(2, step)}, comm=None, keep=2)
    assert (tmp_path / "latest").read_text() == "step-3\n"
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == ["step-2", "step-3"]
    atomic.mend_latest(LocalPath(tmp_path))
    (tmp_path / "latest").unlink()
    make(tmp_path / "latest")
    atomic.mend_latest(LocalPath(tmp_path))
    assert (tmp_path / "latest").read_text() == "step-3\n"
