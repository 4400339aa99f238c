"""Saving and loading in one process: bit for bit, whatever the dtype, shape, box; damage is found; other tools read the index."""

import subprocess
from itertools import pairwise

import h5py
import ml_dtypes
import numpy as np
import pytest
import torch
from checkpoints import flip_bit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from some_tensors import H5DUMP, TORCH, as_torch, equal, everything, needs_h5dump, random_array
from thread_ranks import on_ranks

import ckpt
import ckpt.reading.loading
import ckpt.reading.reader
from ckpt.format import hdf5
from ckpt.format.manifest import FILE_NAME, encode, encode_meta
from ckpt.saving import describing, writer
from collectives.arrays.buffer import as_numpy
from collectives.arrays.dtypes import DTYPES


@pytest.fixture
def small_chunks(monkeypatch):
    """Checksums of 64 bytes each, so that small tensors have many."""
    monkeypatch.setattr(writer, "CHUNK_BYTES", 64)
    plain = describing.Manifest
    monkeypatch.setattr(describing, "Manifest", lambda *args, **known: plain(*args, **known, chunk_bytes=64))


def test_every_dtype_and_shape_bit_for_bit(tmp_path):
    tensors = everything()
    meta = {"step": 5, "nested": {"list": [1, 2.5, None, "ü"]}}
    path = ckpt.save(tmp_path / "step-5", tensors, comm=None, meta=meta)
    assert path == tmp_path / "step-5"
    out = {name: np.zeros_like(array) for name, array in tensors.items()}
    assert ckpt.load(path, out) == meta
    assert all(equal(out[name], array) for name, array in tensors.items())
    checkpoint = ckpt.open(path)
    assert checkpoint.meta == meta
    assert checkpoint.names == sorted(tensors)
    for name, array in tensors.items():
        entry = checkpoint[name]
        assert (entry.shape, entry.dtype, entry.nbytes) == (array.shape, array.dtype, array.nbytes)
        assert equal(entry.read(), array)
        assert equal(np.asarray(entry), array)


@pytest.mark.parametrize(
    "array",
    [
        np.ones(3, np.clongdouble),
        np.array(["text"]),
        np.array([None]),
        torch.zeros(3, dtype=torch.uint8).view(torch.bits8),
    ],
)
def test_dtypes_that_no_checkpoint_holds_are_named_with_their_tensor(tmp_path, array):
    problem = rf"tensor 'model/w': dtype {array.dtype} is not supported; expected one of {', '.join(DTYPES)}, or a view"
    for value in (array, ckpt.Shard(array, array.shape, (0,))):
        with pytest.raises(TypeError, match=problem):
            ckpt.save(tmp_path / "a", {"model/b": np.ones(2), "model/w": value}, comm=None)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.complex128, torch.float8_e5m2],
)
def test_torch_tensors_fill_in_place(tmp_path, dtype):
    tensors = {"w": torch.randn(6, 5).to(dtype), "s": torch.tensor(1).to(dtype), "e": torch.empty(0, 2, dtype=dtype)}
    parameter = torch.nn.Parameter(torch.randn(3, 2))
    path = ckpt.save(tmp_path / "a", tensors | {"p": parameter}, comm=None)
    out = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    restored = torch.nn.Parameter(torch.zeros(3, 2))
    ckpt.load(path, out | {"p": restored})
    bits = torch.uint8  # torch compares no float8
    assert all(torch.equal(out[name].flatten().view(bits), t.flatten().view(bits)) for name, t in tensors.items())
    assert torch.equal(restored, parameter) and restored.requires_grad


@pytest.mark.rest
@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
def test_any_box_is_read_from_any_boxes(tmp_path, small_chunks, data):
    """Write a tensor as random bands of rows or columns, a rank each, in any number of files; read a random box of it back."""
    shape = tuple(data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
    dtype = data.draw(st.sampled_from(["float32", "bfloat16", "uint8", "float64"]))
    verify = data.draw(st.booleans())
    tensor = random_array(dtype, shape, seed=1)
    axis = data.draw(st.integers(0, len(shape) - 1))
    cuts = sorted({0, shape[axis], *data.draw(st.lists(st.integers(0, shape[axis]), max_size=3))})
    bands = list(pairwise(cuts))
    files = data.draw(st.sampled_from(["rank", "one", len(bands), (len(bands) + 1) // 2]))
    folder = tmp_path / str(len(list(tmp_path.iterdir())))

    def save(comm):
        start, stop = bands[comm.rank]
        where = tuple(slice(start, stop) if d == axis else slice(None) for d in range(len(shape)))
        offset = tuple(start if d == axis else 0 for d in range(len(shape)))
        shard = ckpt.Shard(np.ascontiguousarray(tensor[where]), shape, offset)
        ckpt.save(folder, {"t": shard, "all": tensor}, comm=comm, files=files)

    on_ranks(len(bands), save)
    assert ckpt.verify(folder) == []
    assert equal(ckpt.open(folder)["all"].read(verify=verify), tensor)
    offset = tuple(data.draw(st.integers(0, n)) for n in shape)
    box = ckpt.Box(offset, tuple(data.draw(st.integers(0, n - o)) for o, n in zip(offset, shape, strict=True)))
    entry = ckpt.open(folder)["t"]
    assert equal(entry.read(box, verify=verify), tensor[box.slices])
    with h5py.File(folder / "index.h5") as index:
        assert np.array_equal(index["t"][...], tensor.astype(index["t"].dtype), equal_nan=dtype != "uint8")


def test_only_touched_chunks_are_read(tmp_path, small_chunks, monkeypatch):
    array = np.arange(1600, dtype="u1").reshape(100, 16)  # 25 chunks of 4 rows
    entry = ckpt.open(ckpt.save(tmp_path / "a", {"x": array}, comm=None))["x"]
    read = []
    plain = ckpt.reading.reader.Reader._read
    monkeypatch.setattr(
        ckpt.reading.reader.Reader, "_read", lambda self, *args: (read.append(len(args[-1])), plain(self, *args))[1]
    )
    assert np.array_equal(entry[4:8], array[4:8])
    assert read == [64]
    read.clear()
    assert np.array_equal(entry[6:13, 2:3], array[6:13, 2:3])
    assert read == [64] * 3
    read.clear()
    assert np.array_equal(entry.read(np.s_[6:7], verify=False), array[6:7])
    assert read == [16]


# Names, shapes, dtypes


def test_names_that_do_not_fit(tmp_path):
    path = ckpt.save(
        tmp_path / "a", {"model/weight": np.zeros(3), "model/bias": np.ones(2), "step": np.array(1)}, comm=None
    )
    weight = np.full(3, 7.0)
    with pytest.raises(
        ckpt.CheckpointError, match=r"does not hold 'model/wieght' \(nearest: 'model/weight'\).*it holds"
    ):
        ckpt.load(path, {"model/wieght": weight})
    assert (weight == 7).all()
    with pytest.raises(ckpt.CheckpointError, match="it holds 'step', which `tensors` does not name"):
        ckpt.load(path, {"model/weight": weight, "model/bias": np.zeros(2)})
    other = np.full(4, 5.0)
    ckpt.load(path, {"model/weight": weight, "other": other}, strict=False)
    assert (weight == 0).all() and (other == 5).all()
    bias = np.zeros(2)
    ckpt.load(path, {"model/weight": weight, "model/bias": bias}, only="model/*")
    assert (bias == 1).all()
    with pytest.raises(ckpt.CheckpointError, match="it holds 'model/bias'"):
        ckpt.load(path, {"model/weight": weight}, only="model/*")
    many = {f"name{i}": np.zeros(1) for i in range(9)}
    with pytest.raises(ckpt.CheckpointError, match="'name4' and 4 more"):
        ckpt.load(path, many)


def test_only_counts_for_what_is_asked_as_for_what_is_stored(tmp_path):
    stored = {"model/w": np.zeros(4), "model/b[0]": np.ones(2), "step": np.array(1)}
    path = ckpt.save(tmp_path / "a", stored, comm=None)
    asked = {"model/w": np.full(4, 7.0), "model/b[0]": np.full(2, 7.0), "step": np.array(7), "other": np.zeros(3)}
    ckpt.load(path, asked, only="model/w")
    assert [array.max() for array in asked.values()] == [0, 7, 7, 0]
    ckpt.load(path, asked, only=("model/b[0]", "step"))  # a name stands for itself
    assert [array.max() for array in asked.values()] == [0, 1, 1, 0]
    with pytest.raises(ckpt.CheckpointError, match="does not hold 'other'"):
        ckpt.load(path, asked, only=["model/*", "other"])
    for patterns, tensors in (("modle/w", asked), (["modle/w", "step"], asked), ("modle/w", {})):
        with pytest.raises(ckpt.CheckpointError, match="no tensor's name matches 'modle/w'; nearest: 'model/w'"):
            ckpt.load(path, tensors, only=patterns, strict=False)
    with pytest.raises(
        ckpt.CheckpointError, match=r"matches 'zzz\*'; there are 'model/b\[0\]', 'model/w', 'step', 3 in"
    ):
        ckpt.load(path, asked, only="zzz*")
    for wrong in (5, b"step", ["step", 5], {"step": 5}.values()):
        with pytest.raises(TypeError, match=r"only is .*; expected a pattern such as 'model/\*', or a list"):
            ckpt.load(path, asked, only=wrong)
    with pytest.raises(ValueError, match="only is empty"):
        ckpt.load(path, asked, only=[])


def test_the_latest_of_no_checkpoints(tmp_path):
    for read in (lambda path: ckpt.load(path, {}), ckpt.open):
        with pytest.raises(
            ckpt.CheckpointError, match=r"^there is no checkpoint: the path is None, the result of ckpt\.latest"
        ):
            read(ckpt.latest(tmp_path))


def test_shapes_and_dtypes_that_do_not_fit(tmp_path):
    path = ckpt.save(tmp_path / "a", {"x": np.zeros((3, 2))}, comm=None)
    with pytest.raises(ckpt.CheckpointError, match=r"'x' is float64 \(3, 2\) there; expected float64 \(2, 3\)"):
        ckpt.load(path, {"x": np.zeros((2, 3))})
    with pytest.raises(ckpt.CheckpointError, match=r"expected float32 \(3, 2\)"):
        ckpt.load(path, {"x": np.zeros((3, 2), "f4")})


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ({"x": np.zeros(3, object)}, TypeError, "not supported"),
        ({"x": np.zeros((4, 4), ">f4")[:, ::2]}, TypeError, "byte order"),
        ({"x": [1, 2]}, TypeError, "tensor 'x' is a builtins.list"),
        ({"a//b": np.zeros(1)}, ValueError, "'a//b'"),
        ({"a": np.zeros(1), "a/b": np.zeros(1)}, ValueError, "is a tensor and also the group"),
        ({"x": ckpt.Shard(np.zeros((2, 3)), (4, 3), (3, 0))}, ValueError, "does not lie inside"),
        ({"x": ckpt.Shard(np.zeros(3), (4, 3), (0, 0))}, ValueError, "does not lie inside"),
        (
            {"x": ckpt.Shard(np.zeros((2, 3)), (4, 3), (0, 0))},
            ValueError,
            r"no rank holds element \(2, 0\).*; ranks that .* pass comm=coll",
        ),
        ({"x": np.zeros((1,) * 33)}, ValueError, "33 dimensions"),
        ({"x": ckpt.Shard(np.zeros((0, 1)), (0, 1 << 63), (0, 0))}, ValueError, "no array can have the shape"),
        ([np.zeros(1)], TypeError, "tensors is a list"),
    ],
)
def test_tensors_that_cannot_be_saved(tmp_path, tensors, error, message):
    with pytest.raises(error, match=message):
        ckpt.save(tmp_path / "a", tensors, comm=None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.rest
def test_jax_arrays_are_made_anew(tmp_path):
    jnp = pytest.importorskip("jax.numpy")
    path = ckpt.save(tmp_path / "a", {"x": np.zeros(3, "f4")}, comm=None)
    for value in (jnp.ones(3), ckpt.Shard(jnp.ones(3), (3,), (0,))):
        with pytest.raises(
            TypeError, match=r"^tensor 'x' is a JAX array, .*ckpt\.open\(path\)\.to_jax\(\) makes new ones"
        ):
            ckpt.load(path, {"x": value})
    ckpt.save(path, {"x": jnp.ones(3)}, comm=None, overwrite=True)  # to save one is fine


def test_read_only_arrays_cannot_be_loaded_into(tmp_path):
    array = np.zeros(3)
    path = ckpt.save(tmp_path / "a", {"x": array}, comm=None)
    array.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        ckpt.load(path, {"x": array})


FLOATS = [name for name in TORCH if "float" in name]


@pytest.mark.parametrize("asked", [name for name in FLOATS if "float8" in name])
def test_float8_as_torch_converts_it(tmp_path, asked):
    """Numbers of all sizes: all of float8, some in the middle between two of them, and others. 1000 is 448, infinity or NaN."""
    bits = np.arange(1 << 16, dtype=np.uint32) << 16
    numbers = (bits | np.random.default_rng(0).integers(0, 1 << 16, 1 << 16, np.uint32))[::3].view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        some = [1.0, 300.0, 450.0, 464.0, 464.1, 500.0, 1000.0, -1000.0, 6e4, 1e9, -1e-9]
        values = np.concatenate((numbers, bits[::8].view(np.float32), some))
        stored = {name: as_torch(values.astype(DTYPES[name].numpy)) for name in FLOATS}
    path = ckpt.save(tmp_path / "a", stored, comm=None)
    found = {name: torch.zeros(len(values), dtype=getattr(torch, asked)) for name in FLOATS}
    ckpt.load(path, found, cast=True)
    for name, tensor in stored.items():
        right, got = tensor.to(getattr(torch, asked)), found[name]
        is_nan = right.float().isnan()
        assert torch.equal(got.float().isnan(), is_nan), name
        assert torch.equal(got.view(torch.uint8)[~is_nan], right.view(torch.uint8)[~is_nan]), name


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        ("float32", "bfloat16"),
        ("float16", "float64"),
        ("float64", "float32"),
        ("complex128", "complex64"),
        ("float8_e4m3fn", "float32"),
        ("float8_e4m3fn", "float8_e8m0fnu"),
    ],
)
def test_dtypes_are_converted_when_asked_to(tmp_path, monkeypatch, stored, asked):
    monkeypatch.setattr(ckpt.reading.loading, "_CAST_ELEMENTS", 10)
    array = np.random.default_rng(0).normal(size=(7, 3, 5)).astype(DTYPES[stored].numpy)
    path = ckpt.save(tmp_path / "a", {"x": array, "n": np.arange(3)}, comm=None)
    out = np.zeros((4, 3, 5), DTYPES[asked].numpy)
    wanted = {"x": ckpt.Shard(out, array.shape, (2, 0, 0)), "n": np.zeros(3, int)}
    with pytest.raises(ckpt.CheckpointError, match=r"\(cast=True converts it\)"):
        ckpt.load(path, wanted)
    ckpt.load(path, wanted, cast=True)
    values = array[2:6] if array.itemsize > 1 else array[2:6].astype(np.float32)
    if asked == "float8_e8m0fnu":
        assert equal(out, as_numpy(torch.from_numpy(values).to(torch.float8_e8m0fnu)))
    else:
        assert equal(out, values.astype(out.dtype))
    other = np.zeros(array.shape, "f4" if array.dtype.kind == "c" else "c8")
    with pytest.raises(ckpt.CheckpointError, match=rf"expected {other.dtype} \(7, 3, 5\)$"):
        ckpt.load(path, {"x": other}, only="x", cast=True)  # what a real number lacks nobody makes up, nor drops
    with pytest.raises(ckpt.CheckpointError, match=r"expected int32 \(3,\)$"):
        ckpt.load(path, {"n": np.zeros(3, np.int32)}, only="n", cast=True)


# Damage


def test_every_flipped_bit_of_a_tensor_is_found(tmp_path, small_chunks):
    arrays = {
        "a": random_array("float32", (10, 10)),
        "b": random_array("bfloat16", (33,)),
        "c": random_array("bool", (40,)),
    }
    path = ckpt.save(tmp_path / "a", arrays, comm=None)
    file = path / "rank-00000.h5"
    good = file.read_bytes()
    for name, array in arrays.items():
        start = good.index(array.tobytes())
        for position in range(start, start + array.nbytes, 3):
            damaged = bytearray(good)
            damaged[position] ^= 1 << position % 8
            file.write_bytes(damaged)
            out = {n: np.zeros_like(a) for n, a in arrays.items()}
            with pytest.raises(ckpt.CheckpointError, match=rf"tensor '{name}': rank-00000\.h5 is damaged"):
                ckpt.load(path, out)
            ckpt.load(path, out, verify=False)
    # a part that does not touch the damaged chunk is still good
    file.write_bytes(good)
    flip_bit(file, arrays["a"].tobytes())
    assert equal(ckpt.open(path)["a"].read(np.s_[5:]), arrays["a"][5:])
    with pytest.raises(ckpt.CheckpointError):
        ckpt.open(path)["a"].read(np.s_[:, 3:5])


def test_missing_and_truncated_files_are_named(tmp_path):
    arrays = {"x": np.arange(1000.0)}
    path = ckpt.save(tmp_path / "step-1", arrays, comm=None)
    file = path / "rank-00000.h5"
    entry = ckpt.open(path)["x"]
    with file.open("r+b") as f:
        f.truncate(file.stat().st_size - 1)
    with pytest.raises(ckpt.CheckpointError, match=r"step-1: rank-00000\.h5 has .* bytes instead of"):
        ckpt.load(path, arrays)
    with pytest.raises(ckpt.CheckpointError, match=r"tensor 'x': rank-00000\.h5 has"):
        entry.read()
    file.unlink()
    with pytest.raises(ckpt.CheckpointError, match=r"rank-00000\.h5 is missing"):
        ckpt.load(path, arrays)
    with pytest.raises(ckpt.CheckpointError, match=r"tensor 'x': rank-00000\.h5 cannot be opened"):
        entry.read()
    (path / FILE_NAME).unlink()
    with pytest.raises(ckpt.CheckpointError, match=r"has no manifest\.jsonl"):
        ckpt.load(path, arrays)
    with pytest.raises(ckpt.CheckpointError, match="does not exist"):
        ckpt.load(tmp_path / "nowhere", arrays)


def test_a_file_cut_while_it_is_read(tmp_path):
    """The size was right when it was opened; the bytes are gone when they are read."""
    path = ckpt.save(tmp_path / "a", {"x": np.arange(1000.0)}, comm=None)
    checkpoint = ckpt.open(path)
    tensor = checkpoint._manifest.tensors["x"]
    with ckpt.reading.reader.Reader(checkpoint.path, checkpoint._manifest, verify=True) as reader:
        reader._open(0)
        with (path / "rank-00000.h5").open("r+b") as f:
            f.truncate(5000)
        with pytest.raises(ckpt.CheckpointError, match=r"tensor 'x': rank-00000\.h5 ends at byte 5000"):
            reader.fill(np.zeros(1000), tensor, ckpt.Box((0,), (1000,)))


def test_encoding_is_stable(tmp_path):
    """Same tensors, same manifest but for the time: keys in any order."""
    a = ckpt.save(tmp_path / "1" / "a", {"x": np.zeros(3), "y": np.ones(2)}, comm=None)
    b = ckpt.save(tmp_path / "2" / "a", {"y": np.ones(2), "x": np.zeros(3)}, comm=None)
    assert (a / FILE_NAME).read_bytes().splitlines()[1:-1] == (b / FILE_NAME).read_bytes().splitlines()[1:-1]
    manifest = ckpt.open(a)._manifest
    assert encode(manifest) == (a / FILE_NAME).read_bytes()


# Other tools


@pytest.mark.rest
def test_the_index_shows_plain_tensors_to_h5py(tmp_path, monkeypatch):
    tensors = everything()
    path = ckpt.save(tmp_path / "a", tensors, comm=None, meta={"step": 5})
    monkeypatch.chdir("/")  # sources are found beside the index, not in the current folder
    with h5py.File(path / "index.h5") as index:
        assert index.attrs["meta"] == '{"step":5}'
        for name, array in tensors.items():
            dataset = index[name]
            assert dataset.shape == array.shape
            assert dataset.attrs.get("dtype") == (array.dtype.name if array.dtype.isbuiltin != 1 else None)
            if array.dtype.name.startswith("float8"):
                assert dataset.dtype == np.uint8  # HDF5 has no such float
                assert equal(np.asarray(dataset[()]).view(array.dtype), array)
                continue
            # bf16: an HDF5 float of 16 bits, which h5py widens
            assert dataset.dtype == (np.float32 if array.dtype == ml_dtypes.bfloat16 else array.dtype)
            inexact = dataset.dtype.kind in "fc"
            assert np.array_equal(dataset[()], array.astype(dataset.dtype), equal_nan=inexact)
            assert dataset.is_virtual == bool(array.shape and array.size)
    with h5py.File(path / "rank-00000.h5") as file:
        assert set(file) == set(DTYPES)
    with h5py.File(path / "rank-00000.h5") as file:
        assert ckpt.look(path) == []
        assert file["float8_e4m3fn"].attrs["dtype"] == "float8_e4m3fn" and file["complex64"].dtype == np.complex64


def test_an_index_from_kept_entries_is_the_one_that_is_made_anew(tmp_path):
    before: dict[int, bytes] = {}
    for keeps in (False, True, False):
        for value in (1, 2, 3):
            if not keeps:
                hdf5._kept.clear()
            same = {"half": np.array(value, ml_dtypes.bfloat16), "step": np.array(value), "a/w": np.ones((4, 3), "f4")}
            tensors = {**same, "more": np.zeros((max(2, value), 5), "f4")}
            meta = {"text": "x" * value**9}
            path = ckpt.save(tmp_path / "a", tensors, comm=None, meta=meta, overwrite=True)
            image = (path / "index.h5").read_bytes()
            assert before.setdefault(value, image) == image
            with h5py.File(path / "index.h5") as index:
                assert index.attrs["meta"] == encode_meta(meta)
                for name, array in tensors.items():
                    assert np.array_equal(index[name][()], array.astype(index[name].dtype))
            assert len(hdf5._kept) == (2 if keeps else 1)  # 1 and 2 have the same tensors, 3 has others
    assert len(set(before.values())) == 3


def test_what_is_missing_reads_as_nan(tmp_path):
    tensors = {"x": np.ones((2, 2), "f4"), "b": np.ones(2, ml_dtypes.bfloat16), "c": np.ones(2, "c8")}
    float8 = {name: np.ones(2, row.numpy) for name, row in DTYPES.items() if name.startswith("float8")}
    path = ckpt.save(tmp_path / "a", tensors | float8, comm=None)
    (path / "rank-00000.h5").unlink()
    with h5py.File(path / "index.h5") as index:
        assert all(np.isnan(index[name][...]).all() for name in tensors)
        assert all(np.isnan(index[name][...].view(ones.dtype).astype("f4")).all() for name, ones in float8.items())


def test_a_large_meta_is_left_to_the_manifest(tmp_path):
    meta = {"text": "x" * 100_000}
    path = ckpt.save(tmp_path / "a", {"x": np.ones(2)}, comm=None, meta=meta)
    assert ckpt.open(path).meta == meta
    with h5py.File(path / "index.h5") as index:
        assert "meta" not in index.attrs


@needs_h5dump
@pytest.mark.parametrize(
    ("dtype", "array", "lines"),
    [
        ("float32", [[1.5, -2], [0.25, 3]], ["(0,0): 1.5, -2,", "(1,0): 0.25, 3"]),
        ("bfloat16", [[1.5, -2], [0.25, 3]], ["(0,0): 1.5, -2,", "(1,0): 0.25, 3"]),
        ("float16", [[1.5, -2], [0.25, 3]], ["(0,0): 1.5, -2,", "(1,0): 0.25, 3"]),
        ("bool", [[True, False]], ["(0,0): TRUE, FALSE"]),
        ("int64", [[1 << 60, -1]], ["(0,0): 1152921504606846976, -1"]),
        ("bfloat16", 1.5, ["(0): 1.5"]),
        ("complex64", [1.5 - 2j], ["(0): {", "1.5,", "-2"]),
        ("float8_e4m3fn", [[1.5, -2]], ["(0,0): 60, 192", '(0): "float8_e4m3fn"']),
    ],
)
def test_h5dump_reads_the_index_and_the_rank_file(tmp_path, dtype, array, lines):
    value = np.array(array, DTYPES[dtype].numpy)
    path = ckpt.save(tmp_path / "a", {"model/blocks.0.w": value}, comm=None)

    def dump(*args):
        return subprocess.run([H5DUMP, *map(str, args)], capture_output=True, text=True, check=True, cwd="/").stdout

    text = dump("-d", "/model/blocks.0.w", path / "index.h5")
    assert all(line in text for line in lines)
    assert f'DATASET "{dtype}"' in dump("-H", path / "rank-00000.h5")
