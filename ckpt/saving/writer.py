"""Writes this rank's blocks into its data file: HDF5 gives the positions, `pwrite` writes the bytes.

`pwrite` releases the interpreter's lock and needs no parallel HDF5. Each chunk is hashed right before it is written, so that the
checksum needs no second pass through memory.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import h5py
import xxhash

from ckpt.format.errors import naming
from ckpt.format.hdf5 import new_data_file
from ckpt.format.manifest import CHUNK_BYTES, Dataset, File, checksum
from ckpt.saving.placement import DataFile, Item
from ckpt.storage.local import Writeback, check_room, patient, pwrite_all
from ckpt.tensors import LocalBox
from collectives.arrays.dtypes import DTYPES

_HEADER_BYTES = 1 << 15  # enough for the metadata of a data file: a few datasets without large attributes

Checksums = list[str]
"""For each block that a rank writes, in the order of its items, the checksums of its chunks in the form of `StoredBlock`."""


class Bytes(Protocol):
    """The bytes of a block: `LocalBox` has them in memory, `SourcePart` reads them from another file."""

    def chunks(self, nbytes: int) -> Iterable[memoryview]: ...


class Driver(Protocol):
    """Writes the blocks to the data files. All ranks of a file end one step before any rank begins the next step:"""

    def prepare(self) -> File | None: ...
    def write(self, blocks: Sequence[LocalBox], file: File | None) -> Checksums: ...
    def finish(self) -> File | None: ...


class Posix:
    """The ranks write with `pwrite` to a file that the first of them has made."""

    def __init__(self, path: Path, plan: DataFile, rank: int) -> None:
        self._path, self._plan, self._rank = path, plan, rank
        self._file: File | None = None

    def prepare(self) -> File | None:
        """Make the file without its bytes on its first rank, and return its description, which the caller sends to the others."""
        if self._rank == self._plan.ranks[0]:
            check_room(self._path, room_of(self._plan))
            with new_data_file(self._path, self._plan.elements) as opened:
                datasets = datasets_of(opened, self._plan)
            self._file = describe(self._path, datasets)
        return self._file

    def write(self, blocks: Sequence[Bytes], file: File | None) -> Checksums:
        """Write the bytes of the rank's items, `blocks` in the same order, to the page cache.

        `file`: the result of `prepare` on the first rank. OSError that names the file.
        """
        assert file is not None
        with naming(self._path):
            fd = patient(lambda: os.open(self._path, os.O_WRONLY | os.O_CLOEXEC))
            try:
                writeback = Writeback(fd)
                return [
                    _write(fd, block.chunks(CHUNK_BYTES), _position(file, item), writeback)
                    for block, item in zip(blocks, self._plan.items[self._rank], strict=True)
                ]
            finally:
                os.close(fd)

    def finish(self) -> File | None:
        """The description of the complete file on its first rank; None on the others."""
        return self._file


def room_of(plan: DataFile) -> int:
    """The most bytes that a data file needs on the disk."""
    return _HEADER_BYTES + sum(count * DTYPES[dtype].itemsize for dtype, count in plan.elements.items())


def datasets_of(opened: Mapping[str, h5py.h5d.DatasetID], plan: DataFile) -> dict[str, Dataset]:
    """The places of the datasets of an open data file."""
    return {dtype: Dataset(dataset.get_offset(), plan.elements[dtype]) for dtype, dataset in opened.items()}


def describe(path: Path, datasets: dict[str, Dataset]) -> File:
    """The manifest's entry for a data file that has its datasets."""
    with naming(path), open(path, "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        return File(path.name, nbytes, datasets, rest_checksum(file.fileno(), nbytes, datasets))


def rest_checksum(fd: int, nbytes: int, datasets: Mapping[str, Dataset]) -> str:
    """The checksum of the bytes of a file outside its datasets, end to end."""
    hashed = xxhash.xxh3_64()
    at = 0
    ends = sorted(
        (d.offset_bytes, d.offset_bytes + d.elements * DTYPES[dtype].itemsize) for dtype, d in datasets.items()
    )
    for begin, end in [*ends, (nbytes, nbytes)]:
        while at < begin:
            data = os.pread(fd, min(begin - at, CHUNK_BYTES), at)
            if not data:
                raise OSError(f"it ends at byte {at} instead of {nbytes}")
            hashed.update(data)
            at += len(data)
        at = max(at, end)
    return hashed.hexdigest()


def _position(file: File, item: Item) -> int:
    return file.datasets[item.dtype].offset_bytes + item.start * DTYPES[item.dtype].itemsize


def _write(fd: int, chunks: Iterable[memoryview], position: int, writeback: Writeback) -> str:
    checksums = ""
    for chunk in chunks:
        checksums += checksum(chunk)
        pwrite_all(fd, chunk, position)
        writeback.wrote(position, position := position + len(chunk))
    return checksums
