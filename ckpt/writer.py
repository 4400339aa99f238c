"""Writes one rank's blocks into its file: HDF5 says where, `pwrite` carries the bytes.

`pwrite` releases the interpreter's lock and needs no parallel HDF5; each chunk is hashed right before it is written, so that the
checksum costs no second pass through memory.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from ckpt.hdf5 import create_rank_file, naming
from ckpt.layout import pack
from ckpt.manifest import CHUNK_BYTES, Block, File
from ckpt.tensors import Local
from collectives.dtypes import TABLE


class Written(NamedTuple):
    """One rank's file, and its blocks by the name of their tensor (their `file` is still to be set)."""

    file: File
    blocks: dict[str, Block]


def write_rank_file(path: Path, locals_: Sequence[Local]) -> Written | None:
    """Write the boxes of `locals_` (none of them empty) to a new HDF5 file at `path` and flush it to disk.

    None if there is nothing to write: then there is no file. OSError that names the path if it cannot be written.
    """
    if not locals_:
        return None
    by_dtype: dict[str, list[Local]] = {}
    for local in locals_:
        by_dtype.setdefault(local.dtype, []).append(local)
    packed = {
        dtype: pack([local.box.size for local in group], TABLE[dtype].itemsize) for dtype, group in by_dtype.items()
    }
    with naming(path):
        datasets = create_rank_file(path, {dtype: end for dtype, (_, end) in packed.items()})
        blocks = {}
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            for dtype, group in by_dtype.items():
                for local, start in zip(group, packed[dtype][0], strict=True):
                    position = datasets[dtype].offset_bytes + start * TABLE[dtype].itemsize
                    blocks[local.name] = Block(-1, start, local.box, _write(fd, local.bytes, position))
            os.fsync(fd)
            nbytes = os.fstat(fd).st_size
        finally:
            os.close(fd)
    return Written(File(path.name, nbytes, datasets), blocks)


def _write(fd: int, data: memoryview, position: int) -> tuple[int, ...]:
    checksums = []
    for start in range(0, len(data), CHUNK_BYTES):
        chunk = data[start : start + CHUNK_BYTES]
        checksums.append(xxhash.xxh3_64_intdigest(chunk))
        done = 0
        while done < len(chunk):
            done += os.pwrite(fd, chunk[done:], position + start + done)
    return tuple(checksums)


def write_file(path: Path, data: bytes) -> None:
    """A new file at `path` with `data`, flushed to disk."""
    with naming(path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)


def flush(path: Path) -> None:
    """Flush a file or a folder (its list of names) to disk."""
    with naming(path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
