"""Files of tokens act as one sequence."""

import os
import struct
from pathlib import Path

import h5py
import numpy as np
import pytest

import ckpt
from mpitrain.job.data import Batches
from mpitrain.job.data.tokens import MegatronWriter, Tokens, open_tokens, smallest_dtype


def megatron(path: Path, documents: list[np.ndarray], code: int, dtype: str) -> Path:
    """A .bin file with its index, as Megatron-LM writes them."""
    lengths = np.array([len(each) for each in documents], np.int32)
    pointers = np.concatenate(([0], np.cumsum(lengths[:-1]))) * np.dtype(dtype).itemsize
    path.write_bytes(np.concatenate(documents).astype(dtype).tobytes())
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(documents), len(documents) + 1)
    index = head + lengths.tobytes() + pointers.astype(np.int64).tobytes() + np.arange(len(documents) + 1).tobytes()
    path.with_suffix(".idx").write_bytes(index)
    return path


@pytest.mark.parametrize(
    ("num_tokens", "code", "dtype"), [(256, 1, "<u1"), (257, 8, "<u2"), (65536, 8, "<u2"), (65537, 4, "<i4")]
)
def test_writing_for_megatron(tmp_path: Path, num_tokens: int, code: int, dtype: str) -> None:
    random = np.random.default_rng(0)
    documents = [random.integers(0, num_tokens, length, np.int32) for length in (3, 1, 0, 2_000_000, 5)]
    writer = MegatronWriter(tmp_path / "a.bin", smallest_dtype(num_tokens))
    for document in documents:
        writer.add(document)
    assert not (tmp_path / "a.bin").exists()
    writer.commit()
    expected = megatron(tmp_path / "b.bin", documents, code, dtype)
    assert (tmp_path / "a.bin").read_bytes() == expected.read_bytes()
    assert (tmp_path / "a.idx").read_bytes() == expected.with_suffix(".idx").read_bytes()
    assert len(open_tokens([str(tmp_path / "a.bin")], 0.0).train) == 2_000_009
    MegatronWriter(tmp_path / "none.bin", np.dtype(np.uint16)).commit()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx", "b.bin", "b.idx"]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """The numbers from 0 to 299 in three files, one of each kind."""
    megatron(tmp_path / "a.bin", [np.arange(40), np.arange(40, 100)], 8, "<u2")
    np.save(tmp_path / "b.npy", np.arange(100, 200, dtype=np.int32))
    with h5py.File(tmp_path / "c.h5", "w") as file:
        file["tokens"], file["other"] = np.arange(200, 300), np.zeros((2, 2))
    return [str(tmp_path / name) for name in ("a.bin", "b.npy", "c.h5")]


def test_many_files_are_one_sequence(files: list[str]) -> None:
    found = open_tokens(files, 0.1)
    assert (len(found.train), len(found.heldout), str(found)) == (
        270,
        30,
        "3 files of tokens, 0.0 M to train on, 0.00 M held out",
    )
    starts = np.array([0, 95, 190, 0, 150])
    assert np.array_equal(found.train.windows(starts, 110), starts[:, None] + np.arange(110))
    assert np.array_equal(found.heldout.windows(np.array([3]), 20), 273 + np.arange(20)[None])
    whole = Batches(Tokens([np.arange(300, dtype=np.uint16)]), context=16, batch=4, seed=1)
    parts = Batches(open_tokens(files, 0.0).train, context=16, batch=4, seed=1)
    small = Batches((np.arange(300) % 256).astype(np.uint8), context=16, batch=4, seed=1)
    for step in range(12):
        rows = parts.get(step, range(1, 4))
        assert rows.dtype == np.int64 and np.array_equal(rows, whole.get(step, range(1, 4)))
        assert np.array_equal(rows % 256, small.get(step, range(1, 4))), "the order is that of text"


@pytest.mark.rest
def test_the_fingerprint_is_of_the_files_and_the_split(files: list[str]) -> None:
    prints = {open_tokens(names, share).fingerprint for names in (files, files[1:]) for share in (0.0, 0.1)}
    assert len(prints) == 4 and open_tokens(files, 0.1).fingerprint in prints


def lost_index(folder: Path) -> None:
    (folder / "a.idx").unlink()


def pipe_as_index(folder: Path) -> None:
    lost_index(folder)
    os.mkfifo(folder / "a.idx")


def device_as_index(folder: Path) -> None:
    lost_index(folder)
    (folder / "a.idx").symlink_to("/dev/zero")


def other_index(folder: Path) -> None:
    (folder / "a.idx").write_bytes(b"all work and no play makes a dull index")


def cut_index(folder: Path) -> None:
    (folder / "a.idx").write_bytes((folder / "a.idx").read_bytes()[:45])


def floats(folder: Path) -> None:
    data = bytearray((folder / "a.idx").read_bytes())
    data[17] = 6
    (folder / "a.idx").write_bytes(data)


def cut_tokens(folder: Path) -> None:
    (folder / "a.bin").write_bytes((folder / "a.bin").read_bytes()[:-2])


def matrix(folder: Path) -> None:
    np.save(folder / "b.npy", np.zeros((3, 3), np.int32))


def pickled(folder: Path) -> None:
    np.save(folder / "b.npy", np.array([{}], object), allow_pickle=True)


def no_numpy(folder: Path) -> None:
    (folder / "b.npy").write_bytes(b"")


def zipped(folder: Path) -> None:
    with open(folder / "b.npy", "wb") as file:
        np.savez(file, tokens=np.arange(9))


def long(folder: Path) -> None:
    with open(folder / "b.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<i8", "fortran_order": False, "shape": (10**30,)})


def open_bracket(folder: Path) -> None:
    (folder / "b.npy").write_bytes((folder / "b.npy").read_bytes().replace(b",)", b",("))


def no_hdf5(folder: Path) -> None:
    (folder / "c.h5").write_bytes(b"all work and no play")


def chunked(folder: Path) -> None:
    with h5py.File(folder / "c.h5", "w") as file:
        file.create_dataset("tokens", data=np.arange(99), chunks=(10,), compression="gzip")


def two(folder: Path) -> None:
    with h5py.File(folder / "c.h5", "w") as file:
        file["x"], file["y"] = np.arange(3), np.arange(4)


@pytest.mark.rest
@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lost_index, r"a.idx cannot be read: No such file"),
        (pipe_as_index, r"a.idx is a pipe; expected a regular file"),
        (device_as_index, r"a.idx is a device; expected a regular file"),
        (other_index, r"a.idx: expected an index of Megatron-LM"),
        (cut_index, r"a.idx: the file is cut off: it has 45 bytes, and lists 2 sequences"),
        (floats, r"a.idx: expected version 1 and a dtype of integers, got version 1 and dtype 6"),
        (cut_tokens, r"a.bin: it has 198 bytes, and its index lists 100 tokens of 2 bytes"),
        (matrix, r"b.npy: expected a 1-D array of integers, got int32 of shape \(3, 3\)"),
        (pickled, r"b.npy: .*[Aa]rray can't be memory-mapped|b.npy: Object arrays cannot be loaded"),
        (no_numpy, r"b.npy: "),
        (zipped, r"b.npy: .*magic string is not correct"),
        (long, r"b.npy: expected an array of NumPy: "),
        (open_bracket, r"b.npy: expected an array of NumPy: "),
        (no_hdf5, r"c.h5: HDF5 cannot read it"),
        (
            chunked,
            r"c.h5: 'tokens' is chunked, and only contiguous datasets can be mapped: h5repack -l tokens:CONTI",
        ),
        (two, r"c.h5: expected a 1-D dataset of integers named 'tokens', got x, y"),
    ],
)
def test_damaged_files(files: list[str], tmp_path: Path, damage, text: str) -> None:  # type: ignore[no-untyped-def]
    damage(tmp_path)
    with pytest.raises(ValueError, match=f"^data.path: .*{text}"):
        open_tokens(files, 0.0)


def test_a_dataset_by_name(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["ids"] = np.arange(7)
    assert (
        ckpt.map_vector(tmp_path / "a.h5").tolist()
        == ckpt.map_vector(tmp_path / "a.h5", "ids").tolist()
        == list(range(7))
    )
