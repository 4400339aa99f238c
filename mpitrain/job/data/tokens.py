"""Files of tokens that act as one long sequence. They are memory-mapped: a rank reads the windows of its rows alone.

    .bin with .idx      Megatron-LM's: the index has the dtype, and where documents begin; the tokens are one sequence
    .npy                a 1-D NumPy array
    .h5, .hdf5          a contiguous 1-D dataset of an HDF5 file

Source of the format of .idx: Megatron-LM, megatron/core/datasets/indexed_dataset.py.
"""

import hashlib
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

import ckpt
from ckpt.storage.local_path import open_given
from collectives.files import open_new, write_new
from mpitrain.job.data.documents import with_more_files
from mpitrain.job.data.documents.reading import in_one_line

_IDX_MAGIC = b"MMIDIDX\x00\x00"
_IDX_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_IDX_HEAD = struct.Struct("<9sQBQQ")  # magic, version, dtype, sequences, documents
_WRITTEN_TOKENS = 1 << 20  # at a time


class Tokens:
    """Part of a sequence of tokens, from `begin` to `end - 1`, in several arrays that follow one another."""

    def __init__(self, arrays: Sequence[np.ndarray], begin: int = 0, end: int | None = None) -> None:
        self._arrays = list(arrays)
        self._ends = np.cumsum([len(array) for array in arrays])
        self._begin = begin
        self._end = int(self._ends[-1]) if end is None else end

    def __len__(self) -> int:
        return self._end - self._begin

    def part(self, begin: int, end: int) -> "Tokens":
        """The tokens `begin` to `end - 1` of these."""
        return Tokens(self._arrays, self._begin + begin, self._begin + end)

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """The `length` tokens from each start on: int64 of shape (starts, length)."""
        rows = np.empty((len(starts), length), np.int64)
        for row, start in zip(rows, (np.asarray(starts) + self._begin).tolist(), strict=True):
            at = 0
            which = int(np.searchsorted(self._ends, start, side="right"))
            while at < length:
                array, first = self._arrays[which], int(self._ends[which]) - len(self._arrays[which])
                piece = array[start + at - first : start + length - first]
                row[at : at + len(piece)] = piece
                at, which = at + len(piece), which + 1
        return rows


class MegatronWriter:
    """Writes a .bin file of Megatron-LM and its .idx, document by document.

    The files get their names at `commit`, the index first: until then they are NAME.bin.part and NAME.idx.part.

    Args:
        path: NAME.bin. A file of this name is replaced.
        dtype: of the tokens.

    Raises:
        OSError: the files cannot be written.
    """

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self._path, self._dtype = path, dtype.newbyteorder("<")
        self._code = next(code for code, kind in _IDX_DTYPES.items() if np.dtype(kind) == dtype)
        _part_of(path).unlink(missing_ok=True)  # of a process that was killed
        self._file = os.fdopen(open_new(_part_of(path)), "wb")
        self._waiting: list[np.ndarray] = []
        self._num_waiting = 0
        self._lengths: list[int] = []

    @property
    def num_documents(self) -> int:
        """The documents so far."""
        return len(self._lengths)

    @property
    def num_tokens(self) -> int:
        """The tokens so far."""
        return sum(self._lengths)

    def add(self, tokens: np.ndarray) -> None:
        """Add a document. Its tokens fit the dtype."""
        self._lengths.append(len(tokens))
        self._waiting.append(tokens)
        self._num_waiting += len(tokens)
        if self._num_waiting >= _WRITTEN_TOKENS:
            self._write()

    def commit(self) -> None:
        """End the files, and give them their names. Without documents there are none, because an empty file cannot be mapped."""
        self._write()
        self._file.close()
        if not self.num_tokens:
            self.discard()
            return
        lengths = np.array(self._lengths, "<i4")
        begins = np.concatenate(([0], np.cumsum(lengths[:-1], dtype="<i8"))) * self._dtype.itemsize
        index = self._path.with_suffix(".idx")
        head = _IDX_HEAD.pack(_IDX_MAGIC, 1, self._code, len(lengths), len(lengths) + 1)
        ends_of_documents = np.arange(len(lengths) + 1, dtype="<i8")  # in sequences: each is one
        body = head + lengths.tobytes() + begins.astype("<i8").tobytes() + ends_of_documents.tobytes()
        write_new(_part_of(index), body)
        _part_of(index).replace(index)
        _part_of(self._path).replace(self._path)

    def discard(self) -> None:
        """Remove what was written."""
        self._file.close()
        _part_of(self._path).unlink(missing_ok=True)

    def _write(self) -> None:
        if self._waiting:
            try:
                self._file.write(np.concatenate(self._waiting).astype(self._dtype).data)
            except OSError as error:  # a full disk
                raise OSError(f"{self._path} cannot be written: {error.strerror or error}") from None
        self._waiting, self._num_waiting = [], 0


def smallest_dtype(num_tokens: int) -> np.dtype:
    """The smallest dtype of Megatron-LM's index for the tokens 0 to `num_tokens - 1`."""
    return next(np.dtype(kind) for kind in (np.uint8, np.uint16, np.int32) if num_tokens - 1 <= np.iinfo(kind).max)


def _part_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


class TokenFiles(NamedTuple):
    """The files of a run, split into training and held-out tokens. `fingerprint`: a hash of names, sizes and split."""

    train: Tokens
    heldout: Tokens
    num_files: int
    fingerprint: str

    def __str__(self) -> str:
        sizes = len(self.train) / 1e6, len(self.heldout) / 1e6
        return f"{self.num_files} files of tokens, {sizes[0]:.1f} M to train on, {sizes[1]:.2f} M held out"


def open_tokens(paths: Sequence[str], heldout: float, field: str | None = None) -> TokenFiles:
    """Open files of tokens. The last part of all tokens is held out.

    Args:
        paths: the files, in order.
        heldout: the held-out share, 0 up to, but not including, 1.
        field: the dataset in HDF5 files; see `ckpt.map_vector`.

    Raises:
        ValueError: a file that is none of its kind, or cannot be read.
    """
    with ckpt.VectorFiles() as files:
        arrays = [_mapped(Path(path).expanduser(), field, files) for path in paths]
    tokens = Tokens(arrays)
    digest = hashlib.blake2b(f"tokens {heldout!r}".encode(), digest_size=16)
    for path, array in zip(paths, arrays, strict=True):
        digest.update(f"{os.path.basename(path)}\0{len(array)}\0".encode(errors="surrogateescape"))
    num_train = round(len(tokens) * (1 - heldout))
    train, held = tokens.part(0, num_train), tokens.part(num_train, len(tokens))
    return TokenFiles(train, held, len(paths), digest.hexdigest())


def _mapped(path: Path, field: str | None, files: ckpt.VectorFiles) -> np.ndarray:
    try:
        return with_more_files(lambda: _array(path, field, files))
    except OSError as error:
        raise ValueError(f"data.path: {error.filename or path} cannot be read: {error.strerror or error}") from None
    except (ValueError, EOFError) as error:
        raise ValueError(f"data.path: {error}" if str(path) in str(error) else f"data.path: {path}: {error}") from None


def _array(path: Path, field: str | None, files: ckpt.VectorFiles) -> np.ndarray:
    if path.suffix == ".bin":
        return _of_megatron(path)
    if path.suffix == ".npy":
        array = _of_numpy(path)
        if array.ndim != 1 or array.dtype.kind not in "iu" or not len(array):
            raise ValueError(f"{path}: expected a 1-D array of integers, got {array.dtype} of shape {array.shape}")
        return array
    return files.map(path, field)


def _of_numpy(path: Path) -> np.ndarray:
    """An array that is mapped. ValueError if the file has none, OSError if it cannot be read."""
    try:
        return np.lib.format.open_memmap(path, mode="r")  # np.load would also take an .npz
    except OSError:
        raise
    except Exception as error:  # NumPy takes a header as Python's text, and raises errors of many classes
        raise ValueError(f"{path}: expected an array of NumPy: {in_one_line(error)}") from None


def _of_megatron(path: Path) -> np.ndarray:
    """The tokens of a .bin file, as its .idx file describes them."""
    index = path.with_suffix(".idx")
    size = path.stat().st_size
    with open(open_given(index), "rb") as file:
        index_size = os.fstat(file.fileno()).st_size
        head = file.read(_IDX_HEAD.size)
        if len(head) < _IDX_HEAD.size or not head.startswith(_IDX_MAGIC):
            raise ValueError(f"{index}: expected an index of Megatron-LM, which begins with MMIDIDX")
        _, version, code, num_sequences, num_documents = _IDX_HEAD.unpack(head)
        if version != 1 or code not in _IDX_DTYPES:
            raise ValueError(
                f"{index}: expected version 1 and a dtype of integers, got version {version} and dtype {code}"
            )
        expected = _IDX_HEAD.size + 12 * num_sequences + 8 * num_documents
        if index_size < expected:
            raise ValueError(
                f"{index}: the file is cut off: it has {index_size} bytes, and lists {num_sequences} sequences"
            )
        lengths = np.fromfile(file, "<i4", num_sequences)
    dtype = np.dtype(_IDX_DTYPES[code]).newbyteorder("<")
    num_tokens = int(lengths.sum(dtype=np.int64))
    if (lengths < 0).any() or not num_tokens or size != num_tokens * dtype.itemsize:
        raise ValueError(
            f"{path}: it has {size} bytes, and its index lists {num_tokens} tokens of {dtype.itemsize} bytes"
        )
    return np.memmap(path, dtype, "r", shape=(num_tokens,))
