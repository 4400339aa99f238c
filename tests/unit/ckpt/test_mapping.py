"""Datasets of HDF5 files as maps: the values that h5py reads, or an error; never other bytes of the file."""

import os
import signal
from pathlib import Path

import h5py
import numpy as np
import pytest

import ckpt
from ckpt.reading import mapping

VALUES = np.arange(1000, 1100, dtype=np.uint16)


def made(path: Path, **members: object) -> Path:
    """A file with these members, which h5py takes as they are, and with other values."""
    with h5py.File(path, "w") as file:
        file["other"] = np.full((40, 100), 7, np.uint16)
        for name, member in members.items():
            file[name.replace("__", "/")] = member
    return path


def other(folder: Path) -> Path:
    return made(folder / "real.h5", tokens=VALUES)


def of_big_ends(folder: Path) -> Path:
    return made(folder / "a.h5", tokens=VALUES.astype(">u2"))


def behind_soft_links(folder: Path) -> Path:
    absolute, relative, first = h5py.SoftLink("/first"), h5py.SoftLink("data/ids"), h5py.SoftLink("a/d")
    return made(folder / "a.h5", data__ids=VALUES, tokens=first, a__d=absolute, first=relative)


def with_room_at_its_begin(folder: Path) -> Path:
    with h5py.File(folder / "a.h5", "w", userblock_size=1024) as file:
        file["tokens"] = VALUES
    return folder / "a.h5"


def of_new_version(folder: Path) -> Path:
    with h5py.File(folder / "a.h5", "w", libver="latest") as file:
        for number in range(20):  # so many links lie in a heap
            file[f"other{number}"] = np.zeros((2, 2))
        file["tokens"] = VALUES
    return folder / "a.h5"


def the_only_one(folder: Path) -> Path:
    return made(folder / "a.h5", ids=VALUES)


def of_enumerated(folder: Path) -> Path:
    kind = h5py.enum_dtype({"a": 0, "b": 2000}, basetype="u2")
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("tokens", data=VALUES, dtype=kind)
    return folder / "a.h5"


RIGHT = (of_big_ends, behind_soft_links, with_room_at_its_begin, of_new_version, the_only_one, of_enumerated)


@pytest.fixture(scope="module")
def files():  # type: ignore[no-untyped-def]
    with ckpt.VectorFiles() as opened:
        yield opened


@pytest.mark.parametrize("make", RIGHT, ids=lambda make: make.__name__)
def test_values_as_h5py_reads_them(tmp_path: Path, files: ckpt.VectorFiles, make) -> None:  # type: ignore[no-untyped-def]
    found = files.map(make(tmp_path))
    assert found.tolist() == VALUES.tolist() and isinstance(found, np.memmap) and found.dtype.itemsize == 2


def external(folder: Path) -> Path:
    other(folder)
    return made(folder / "a.h5", tokens=h5py.ExternalLink("real.h5", "tokens"))


def external_beside_a_vector(folder: Path) -> Path:
    other(folder)
    return made(folder / "a.h5", tokens=h5py.ExternalLink("real.h5", "tokens"), lengths=np.arange(50))


def the_only_one_external(folder: Path) -> Path:
    other(folder)
    return made(folder / "a.h5", ids=h5py.ExternalLink("real.h5", "tokens"))


def soft_to_external(folder: Path) -> Path:
    other(folder)
    links = {"group": h5py.ExternalLink("real.h5", "/"), "tokens": h5py.SoftLink("/group/tokens")}
    return made(folder / "a.h5", **links)


def external_to_a_pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return made(folder / "a.h5", tokens=h5py.ExternalLink(str(folder / "pipe"), "tokens"))


def circle(folder: Path) -> Path:
    return made(folder / "a.h5", tokens=h5py.SoftLink("b"), b=h5py.SoftLink("tokens"))


def nowhere(folder: Path) -> Path:
    return made(folder / "a.h5", tokens=h5py.SoftLink("b"), ids=VALUES)


def virtual(folder: Path) -> Path:
    source = h5py.VirtualSource(other(folder), "tokens", shape=(100,))
    layout = h5py.VirtualLayout(shape=(100,), dtype="u2")
    layout[:] = source
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_virtual_dataset("tokens", layout)
    return folder / "a.h5"


def external_storage(folder: Path) -> Path:
    with h5py.File(folder / "a.h5", "w") as file:
        file["other"] = np.full(4000, 7, np.uint16)
        its = file.create_dataset("tokens", (100,), "u2", external=[(str(folder / "raw"), 0, 200)])
        its[:] = VALUES
    return folder / "a.h5"


def chunked(folder: Path) -> Path:
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("tokens", data=VALUES, chunks=(10,), compression="gzip")
    return folder / "a.h5"


def compact(folder: Path) -> Path:
    with h5py.File(folder / "a.h5", "w") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_layout(h5py.h5d.COMPACT)
        space, kind = h5py.h5s.create_simple((100,)), h5py.h5t.STD_U16LE
        h5py.h5d.create(file.id, b"tokens", kind, space, plist).write(h5py.h5s.ALL, h5py.h5s.ALL, VALUES)
    return folder / "a.h5"


def never_written(folder: Path) -> Path:
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("tokens", (100,), "u2", fillvalue=7)
    return folder / "a.h5"


def without_values(folder: Path) -> Path:
    return made(folder / "a.h5", tokens=VALUES[:0])


def of_twelve_bits(folder: Path) -> Path:
    kind = h5py.h5t.STD_U16LE.copy()
    kind.set_precision(12)
    kind.set_offset(2)
    with h5py.File(folder / "a.h5", "w") as file:
        space = h5py.h5s.create_simple((100,))
        h5py.h5d.create(file.id, b"tokens", kind, space).write(h5py.h5s.ALL, h5py.h5s.ALL, VALUES)
        assert np.array_equal(file["tokens"], VALUES)
    return folder / "a.h5"


def matrix_beside_a_vector(folder: Path) -> Path:
    return made(folder / "a.h5", tokens=VALUES.reshape(2, 50), lengths=np.arange(50))


def floats(folder: Path) -> Path:
    return made(folder / "a.h5", tokens=np.ones(2, np.float32))


def truths(folder: Path) -> Path:
    return made(folder / "a.h5", tokens=np.ones(2, bool))


def words(folder: Path) -> Path:
    return made(folder / "a.h5", tokens="words")


def records(folder: Path) -> Path:
    return made(folder / "a.h5", tokens=np.zeros((3, 1), [("a", "f4"), ("b", "i4")]))


def times(folder: Path) -> Path:
    with h5py.File(folder / "a.h5", "w") as file:
        h5py.h5d.create(file.id, b"tokens", h5py.h5t.UNIX_D32LE, h5py.h5s.create_simple((1,)))
    return folder / "a.h5"


def of_long_floats(folder: Path) -> Path:
    kind = h5py.h5t.IEEE_F64LE.copy()
    kind.set_size(32)
    kind.set_precision(256)
    kind.set_fields(255, 236, 19, 0, 236)
    with h5py.File(folder / "a.h5", "w") as file:
        h5py.h5d.create(file.id, b"tokens", kind, h5py.h5s.create_simple((2,)))
    return folder / "a.h5"


def of_three_bytes(folder: Path) -> Path:
    kind = h5py.h5t.STD_I32LE.copy()
    kind.set_size(3)
    with h5py.File(folder / "a.h5", "w") as file:
        h5py.h5d.create(file.id, b"tokens", kind, h5py.h5s.create_simple((2,)))
        file["ids"] = VALUES
    return folder / "a.h5"


def a_group(folder: Path) -> Path:
    return made(folder / "a.h5", ids=VALUES, tokens__x=VALUES)


def cut_off(folder: Path) -> Path:
    path = made(folder / "a.h5", tokens=np.arange(100_000))
    os.truncate(path, 100_000)
    return path


def a_pipe(folder: Path) -> Path:
    os.mkfifo(folder / "a.h5")
    return folder / "a.h5"


WRONG = {
    external: "'tokens' is a link to another file, 'real.h5'; expected the values in this file: name that file instead",
    external_beside_a_vector: "'tokens' is a link to another file",
    the_only_one_external: "'ids' is a link to another file, 'real.h5'",
    soft_to_external: "'tokens' is a link to another file, 'real.h5'",
    external_to_a_pipe: "'tokens' is a link to another file",
    circle: "'tokens' leads through more than 16 soft links, or to itself",
    nowhere: "expected a 1-D dataset of integers named 'tokens', got ids",
    virtual: "'tokens' is virtual: it shows values of other datasets, and only contiguous datasets can be mapped: h5repack",
    external_storage: "'tokens' keeps its values in another file, '.*raw'",
    chunked: "'tokens' is chunked, and only contiguous datasets can be mapped: h5repack -l tokens:CONTI -f tokens:NONE",
    compact: "'tokens' is compact",
    never_written: "'tokens' has 100 values, of which none was ever written",
    without_values: "'tokens' is empty",
    of_twelve_bits: "'tokens' has integers that do not fill their bytes",
    matrix_beside_a_vector: "expected a 1-D dataset of integers named 'tokens', got uint16 of shape \\(2, 50\\); there is also lengths",
    floats: "expected a 1-D dataset of integers named 'tokens', got float32 of shape \\(2,\\)$",
    truths: "expected a 1-D dataset of integers named 'tokens', got bool of shape \\(2,\\)$",
    words: "expected a 1-D dataset of integers named 'tokens', got one object$",
    records: "expected a 1-D dataset of integers named 'tokens', got .*f4.* of shape \\(3, 1\\)$",
    times: "expected a 1-D dataset of integers named 'tokens', got a type that NumPy does not have of shape \\(1,\\)$",
    of_long_floats: "expected a 1-D dataset of integers named 'tokens', got a type that NumPy does not have of shape \\(2,\\)$",
    of_three_bytes: "expected .* got a type that NumPy does not have of shape \\(2,\\); there is also ids$",
    a_group: "expected a 1-D dataset of integers named 'tokens', got a group; there is also ids$",
    cut_off: "HDF5 cannot read it: .*truncated file|it is cut off",
    a_pipe: "is a pipe; expected a regular file",
}


@pytest.mark.parametrize("make", WRONG, ids=lambda make: make.__name__)
def test_what_no_map_can_show(tmp_path: Path, files: ckpt.VectorFiles, make) -> None:  # type: ignore[no-untyped-def]
    path = make(tmp_path)
    with pytest.raises(ValueError, match=f"^{path}:? {WRONG[make]}"):
        files.map(path)


def test_datasets_in_groups(tmp_path: Path, files: ckpt.VectorFiles) -> None:
    path = made(tmp_path / "a.h5", a__b__ids=VALUES, a__c=h5py.SoftLink("b/ids"), tokens=VALUES + 1)
    for name in ("a/b/ids", "/a/b/ids", "a//b/./ids", "a/c"):
        assert files.map(path, name)[0] == 1000
    for name in ("a/b", "a/b/ids/x", "a/b/ID", "", "\udcff"):
        with pytest.raises(ValueError, match="expected a 1-D dataset of integers named"):
            files.map(path, name)


def test_a_file_on_which_hdf5_crashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = made(tmp_path / "good.h5", tokens=VALUES)
    with ckpt.VectorFiles() as files, monkeypatch.context() as patch:
        patch.setattr(mapping, "_CHILD", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
        with pytest.raises(
            ValueError,
            match=f"^{good}: HDF5 crashes on it, does not end, or needs more than .*: SIGSEGV; the file is damaged",
        ):
            files.map(good)
        patch.undo()
        assert files.map(good).tolist() == VALUES.tolist()
        assert files._child is not None
        files._child.send_signal(signal.SIGPROF)  # as if it took too long
        with pytest.raises(ValueError, match=r"does not end, .*: SIGPROF"):
            files.map(good)
        assert files.map(good).tolist() == VALUES.tolist()


def test_the_memory_of_hdf5_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_sources(count: int) -> Path:
        layout = h5py.VirtualLayout((count,), "u2")
        for i in range(count):
            layout[i] = h5py.VirtualSource(f"{i}.h5", "x", (1,))[0]
        with h5py.File(tmp_path / f"{count}.h5", "w") as file:
            file.create_virtual_dataset("v", layout)
            file["tokens"] = VALUES
        return tmp_path / f"{count}.h5"

    with ckpt.VectorFiles() as files, pytest.raises(ValueError, match="'v' is virtual"):
        files.map(with_sources(1000), "v")
    monkeypatch.setattr(mapping, "MORE_MEMORY", 8 << 20)
    with ckpt.VectorFiles() as files:
        with pytest.raises(ValueError, match=r"needs more than \d+ MiB of memory.*h5copy"):
            files.map(tmp_path / "1000.h5", "v")
        assert files.map(tmp_path / "1000.h5")[0] == 1000
