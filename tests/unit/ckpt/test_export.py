"""Checkpoints as files of others, read back by the others' own libraries; and what is left when that fails: nothing."""

import json
import os
import resource
import subprocess
import sys
from zipfile import ZipFile

import h5py
import ml_dtypes
import numpy as np
import pytest
import torch
from checkpoints import flip_bit, printed
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch
from some_tensors import (
    H5DUMP,
    SAFETENSORS,
    TORCH,
    equal,
    everything,
    forget_peak,
    needs_h5dump,
    peak_bytes,
    random_array,
)
from thread_ranks import on_ranks

import ckpt
from ckpt.cli import main
from ckpt.reading import sources
from collectives.arrays.buffer import as_numpy
from collectives.arrays.dtypes import DTYPES

FORMATS = ("a.safetensors", "a.pt", "a.npz", "a.h5")
HDF5 = (None, "gzip", "zstd")


def read_back(path):
    """All tensors of a file by its own library. Of bf16, h5py gives float32: exact."""
    if path.suffix == ".safetensors":
        # its NumPy side has no bf16
        return {name: as_numpy(tensor) for name, tensor in load_torch(path).items()}
    if path.suffix == ".pt":
        return {name: as_numpy(t) for name, t in torch.load(path, weights_only=True, mmap=True).items()}
    if path.suffix == ".npz":
        with np.load(path) as file:
            return {name: file[name] for name in file.files}
    found = {}
    with h5py.File(path) as file:
        file.visititems(lambda name, node: found.update({name: node[()]}) if isinstance(node, h5py.Dataset) else None)
    return {name: np.asarray(value) for name, value in found.items()}


def assert_holds(path, tensors):
    found = read_back(path)
    assert found.keys() == tensors.keys()
    for name, array in tensors.items():
        value = found[name]
        if path.suffix == ".npz" and array.dtype.isbuiltin != 1:
            assert value.dtype == np.dtype(f"V{array.itemsize}")  # nothing can be computed with it by mistake
            value = value.view(array.dtype)
        if path.suffix == ".h5" and array.dtype.name.startswith("float8"):
            assert value.dtype == np.uint8
            value = value.view(array.dtype)
        if path.suffix == ".h5" and array.dtype == ml_dtypes.bfloat16:
            assert value.dtype == np.float32
            assert np.array_equal(value, array.astype(np.float32), equal_nan=True)
        else:
            assert equal(value, array), name


@pytest.fixture
def small_pieces(monkeypatch):
    """Tensors of more than 64 bytes are then read and written in several pieces."""
    monkeypatch.setattr(sources, "PIECE_BYTES", 64)


@pytest.mark.rest
@pytest.mark.parametrize("name", FORMATS)
def test_every_dtype_and_shape_bit_for_bit(tmp_path, name):
    tensors = everything({"a.safetensors": SAFETENSORS, "a.pt": TORCH}.get(name, tuple(DTYPES)))
    path = ckpt.save(tmp_path / "step-5", tensors, comm=None)
    assert ckpt.export(path, tmp_path / "new" / name) == [tmp_path / "new" / name]
    assert_holds(tmp_path / "new" / name, tensors)
    assert os.listdir(tmp_path / "new") == [name]
    if name == "a.pt":
        with ZipFile(tmp_path / "new" / name) as file:
            assert file.testzip() is None  # torch does not look at the CRCs, other tools do


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("axis", [0, 1])
def test_shards_are_put_together_piece_by_piece(tmp_path, small_pieces, name, axis):
    tensors = {dtype: random_array(dtype, (6, 15, 2), seed=3) for dtype in ("float32", "bfloat16", "bool", "int64")}

    def save(comm):
        cut = slice(3 * comm.rank, 3 * comm.rank + 3) if axis == 0 else slice(8 * comm.rank, 8 * comm.rank + 8)
        where = (cut,) if axis == 0 else (slice(None), cut)
        offset = tuple(cut.start if d == axis else 0 for d in range(3))
        shards = {n: ckpt.Shard(np.ascontiguousarray(t[where]), t.shape, offset) for n, t in tensors.items()}
        ckpt.save(tmp_path / "c", shards, comm=comm)

    on_ranks(2, save)
    ckpt.export(tmp_path / "c", tmp_path / name)
    assert_holds(tmp_path / name, tensors)


@pytest.mark.rest
@pytest.mark.parametrize("compression", HDF5)
def test_plain_hdf5(tmp_path, compression):
    if compression == "zstd":
        pytest.importorskip("hdf5plugin")
    tensors = everything() | {"big/w": np.tile(np.arange(300, dtype="f4"), (2, 2000, 1)), "big/b": np.zeros(1 << 19)}
    path = ckpt.save(tmp_path / "c", tensors, comm=None, meta={"step": 5})
    ckpt.export(path, tmp_path / "a.h5", compression=compression)
    assert_holds(tmp_path / "a.h5", tensors)
    with h5py.File(tmp_path / "a.h5") as file:
        assert json.loads(file.attrs["meta"]) == {"step": 5}
        assert file["bfloat16/vector"].attrs["dtype"] == "bfloat16"
        assert (file["big/w"].chunks is None) == (compression is None) and not file["big/w"].is_virtual
    size = (tmp_path / "a.h5").stat().st_size
    assert size > ckpt.open(path).nbytes if compression is None else size < 2_000_000


def test_zstd_without_hdf5plugin(tmp_path, monkeypatch):
    path = ckpt.save(tmp_path / "c", {"x": np.zeros(3)}, comm=None)
    monkeypatch.setitem(sys.modules, "hdf5plugin", None)  # as if it were not installed
    with pytest.raises(ValueError, match=r"needs hdf5plugin: pip install 'mpitrain\[zstd\]'"):
        ckpt.export(path, tmp_path / "a.h5", compression="zstd")
    assert sorted(os.listdir(tmp_path)) == ["c", "latest"]


@needs_h5dump
@pytest.mark.parametrize("compression", HDF5[:2])
def test_h5dump_reads_plain_hdf5(tmp_path, compression):
    values = {
        dtype: np.array([[1.5, -2], [0.25, 3]], DTYPES[dtype].numpy) for dtype in ("float32", "bfloat16", "float16")
    }
    path = ckpt.save(tmp_path / "c", {f"model/{name}.w": value for name, value in values.items()}, comm=None)
    ckpt.export(path, tmp_path / "a.h5", compression=compression)
    for name in values:
        command = [H5DUMP, "-d", f"/model/{name}.w", str(tmp_path / "a.h5")]
        text = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout
        assert "(0,0): 1.5, -2," in text and "(1,0): 0.25, 3" in text


def test_safetensors_in_several_files(tmp_path):
    tensors = {f"model/blocks.{i}": random_array("bfloat16", (10, 10), seed=i) for i in range(5)}
    tensors["model/step"] = np.array(7)
    path = ckpt.save(tmp_path / "c", tensors, comm=None)
    files = ckpt.export(path, tmp_path / "hf", shard_bytes=410, strip="model/")
    names = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    assert [file.name for file in files] == [*names, "model.safetensors.index.json"]
    index = json.loads(files[-1].read_text())
    assert index["metadata"]["total_size"] == 1008
    parts = {name: load_torch(tmp_path / "hf" / name) for name in names}
    assert index["weight_map"] == {tensor: name for name, part in parts.items() for tensor in part}
    read = {name: as_numpy(value) for part in parts.values() for name, value in part.items()}
    assert all(equal(read[name.removeprefix("model/")], array) for name, array in tensors.items())
    # fewer files instead: none of the old ones stays
    with pytest.raises(FileExistsError, match="overwrite"):
        ckpt.export(path, tmp_path / "hf")
    ckpt.export(path, tmp_path / "hf", overwrite=True, only="*/step")
    assert os.listdir(tmp_path / "hf") == ["model.safetensors"]
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == {"model/step"}
    # a name of one's own is split as well
    files = ckpt.export(path, tmp_path / "own.safetensors", shard_bytes=410)
    assert [file.name for file in files][2:] == ["own-00003-of-00003.safetensors", "own.safetensors.index.json"]


def test_names_are_chosen_and_cut(tmp_path):
    tensors = {"model/a": np.zeros(1), "model/b/c": np.ones(2), "ema/a": np.ones(3), "step": np.array(1)}
    path = ckpt.save(tmp_path / "c", tensors, comm=None)
    ckpt.export(path, tmp_path / "1.npz", only="model/*", strip="model/")
    assert read_back(tmp_path / "1.npz").keys() == {"a", "b/c"}
    ckpt.export(path, tmp_path / "2.npz", only=["model/a", "st*"], strip="model/")
    assert read_back(tmp_path / "2.npz").keys() == {"a", "step"}


@pytest.mark.parametrize(
    ("out", "options", "message"),
    [
        ("a.bin", {}, r"suffix '\.bin'; expected one of \.safetensors"),
        ("a.npz", {"only": "modle/*"}, "no tensor's name matches 'modle/[*]'; nearest: 'model/a'"),
        ("a.npz", {"strip": "model/"}, "'a' and 'model/a' are both called 'a'"),
        ("a.npz", {"strip": "a"}, "without 'a', 'a' is no valid name: the name '' is no path"),
        ("a.npz", {"only": "model/*", "strip": "model/a"}, "without 'model/a', 'model/a' is no valid name"),
        ("a.h5", {"compression": "lzf"}, "compression is 'lzf'; expected None, 'gzip' or 'zstd'"),
        ("a.pt", {"compression": "gzip"}, r"a\.pt cannot be compressed"),
        ("a.pt", {"shard_bytes": 10}, r"a\.pt cannot be split"),
        ("hf", {"shard_bytes": 0}, "shard_bytes is 0; expected at least 1"),
        ("c", {}, "c is a checkpoint, in which nothing is ever changed"),
        ("a.safetensors", {"only": "z"}, "z has dtype complex128, which safetensors does not know"),
        ("a.pt", {"only": "y"}, "y has dtype float8_e3m4, which torch does not know"),
        (
            "a.safetensors",
            {"only": "__metadata__"},
            "a tensor is called __metadata__, which is no tensor's name in safetensors",
        ),
        ("a.safetensors", {"only": "b/*", "strip": "b/"}, "a tensor is called __metadata__"),
        (
            "a.npz",
            {"only": ["a", "a.npy"]},
            "two tensors are called a and a.npy, and NumPy finds the first one under both names",
        ),
        ("a.npz", {"only": ["a.npy", "a.npy.npy"]}, "two tensors are called a.npy and a.npy.npy"),
    ],
)
def test_what_cannot_be(tmp_path, out, options, message):
    tensors = {
        "a": np.zeros(1),
        "model/a": np.zeros(2),
        "z": np.zeros(2, "c16"),
        "y": np.zeros(2, ml_dtypes.float8_e3m4),
        **dict.fromkeys(("__metadata__", "b/__metadata__", "a.npy", "a.npy.npy"), np.zeros(1)),
    }
    path = ckpt.save(tmp_path / "c", tensors, comm=None)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ValueError, match=message):
        ckpt.export(path, tmp_path / out, **options)
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("name", FORMATS)
def test_odd_names_that_are_names(tmp_path, name):
    names = ("x.npy", "y.npy.npy", "z", "a.__metadata__", "a/__metadata__", "meta", "file", "weight.h5", "ü")
    tensors = {each: np.full(3, number) for number, each in enumerate(names)}
    if name != "a.safetensors":
        tensors["__metadata__"] = np.full(3, 9)
    ckpt.export(ckpt.save(tmp_path / "c", tensors, comm=None), tmp_path / name)
    assert_holds(tmp_path / name, tensors)
    if name == "a.npz":
        with np.load(tmp_path / name) as file:
            assert all(np.array_equal(file[each], tensors[each]) for each in tensors)


class Interrupted(BaseException):
    """As KeyboardInterrupt, which pytest takes for itself."""


@pytest.mark.parametrize("name", [*FORMATS, "hf"])
def test_an_export_that_fails_leaves_nothing(tmp_path, small_pieces, name):
    tensors = {f"t{i}": random_array("float32", (50,), seed=i) for i in range(4)}
    path = ckpt.save(tmp_path / "c", tensors, comm=None)
    out = tmp_path / "out"
    out.mkdir()
    options = {"shard_bytes": 300} if name == "hf" else {}
    target = out if name == "hf" else out / name
    seen = 0

    def interrupt(nbytes):
        nonlocal seen
        seen += nbytes
        if seen > 500:
            raise Interrupted

    with pytest.raises(Interrupted):
        ckpt.export(path, target, progress=interrupt, **options)
    assert os.listdir(out) == []

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700 if name != "hf" else 250, hard))
    try:
        with pytest.raises(OSError, match=r"File too large"):
            ckpt.export(path, target, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(out) == []

    # what a killed one has left is in nobody's way, and the old file stands until the new one is complete
    files = ckpt.export(path, target, **options)
    for file in files:
        file.with_name(f".{file.name}.tmp").write_text("left")
    before = {file.name: file.read_bytes() for file in files}
    flip_bit(path / "rank-00000.h5", tensors["t3"].tobytes())
    with pytest.raises(ckpt.CheckpointError, match="tensor 't3'"):
        ckpt.export(path, target, overwrite=True, **options)
    assert {file: (out / file).read_bytes() for file in before} == before
    ckpt.export(path, target, overwrite=True, verify=False, **options)
    assert sorted(os.listdir(out)) == sorted(before)


@pytest.mark.rest
@pytest.mark.parametrize("name", FORMATS)
def test_memory_is_bounded(tmp_path, name):
    big = np.zeros((32, 1 << 20), "f4")  # 128 MiB
    path = ckpt.save(tmp_path / "c", {"big": big, "small": np.ones(3)}, comm=None)
    del big
    ckpt.export(path, tmp_path / f"small-{name}", only="small")  # imports what it needs
    before = forget_peak()
    ckpt.export(path, tmp_path / name)
    assert peak_bytes() - before < 2 * sources.PIECE_BYTES


def test_the_command(tmp_path, capsys):
    tensors = {"model/w": np.arange(6.0).reshape(2, 3), "model/b": np.ones(2), "step": np.array(1)}
    ckpt.save(tmp_path / "run" / "checkpoints" / "step-1", tensors, comm=None)
    args = ["export", str(tmp_path / "run"), str(tmp_path / "m.safetensors"), "--only", "model/*", "--strip", "model/"]
    assert printed(capsys, *args) == f"{tmp_path / 'm.safetensors'}: {(tmp_path / 'm.safetensors').stat().st_size} B\n"
    assert load_file(tmp_path / "m.safetensors").keys() == {"w", "b"}
    assert main(args) == 2
    assert capsys.readouterr().err.count("\n") == 1
    found = json.loads(printed(capsys, *args, "--overwrite", "--shard-size", "0.04kB", "--json"))
    assert found["tensors"] == 2
    assert [file["path"].rpartition("/")[2] for file in found["files"]] == [
        "m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors", "m.safetensors.index.json"
    ]  # fmt: skip
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "m.npz"), "--only", "x"]) == 2
    assert "no tensor's name matches 'x'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*args, "--shard-size", "5XB"])
    assert "'5XB'; expected a size such as 5GB" in capsys.readouterr().err
