"""The bytes of a checkpoint's files, compared with the checksums in its manifest."""

import os
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import NamedTuple

import numpy as np
import xxhash

from ckpt.format.manifest import CheckpointError, File, Manifest, StoredBlock, Tensor
from ckpt.storage.places import Folder, Place
from ckpt.storage.progress import Progress, no_progress
from collectives.arrays.dtypes import DTYPES

_BUFFER_BYTES = 4 << 20


class Damage(NamedTuple):
    """Bytes `first` up to `last` of a file that differ from the saved ones. `tensor`: the tensor of these bytes, or None."""

    file: str
    first: int
    last: int
    tensor: str | None
    problem: str

    def __str__(self) -> str:
        whose = "" if self.tensor is None else f", of tensor {self.tensor!r}"
        where = f", bytes {self.first} to {self.last}" if self.last else ""
        return f"{self.file}{where}{whose}: {self.problem}"


class _ByteRange(NamedTuple):
    """A run of bytes of a file. `checksum`: of a chunk of a block; None: part of the rest, or zeros in a `gap`."""

    first: int
    last: int
    tensor: str | None = None
    checksum: str | None = None
    gap: bool = False


def verify_files(
    folder: Place,
    manifest: Manifest,
    names: Collection[str] | None = None,
    *,
    threads: int | None = None,
    progress: Progress = no_progress,
) -> list[Damage]:
    """All damage in the manifest's files, or in the files `names`. An unreadable file is damage, too."""
    blocks: dict[int, list[tuple[Tensor, StoredBlock]]] = {
        number: [] for number, file in enumerate(manifest.files) if names is None or file.name in names
    }
    for tensor in manifest.tensors.values():
        for block in tensor.blocks:
            if block.file in blocks:
                blocks[block.file].append((tensor, block))
    files = [manifest.files[number] for number in blocks]
    with closing(folder.open_folder()) as opened, ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        found = pool.map(
            lambda file, inside: _verify_file(opened, file, _extents(file, inside, manifest.chunk_bytes), progress),
            files,
            blocks.values(),
        )
        return [damage for of_file in found for damage in of_file]


def _verify_file(folder: Folder, file: File, extents: Iterable[_ByteRange], progress: Progress) -> list[Damage]:
    found = []
    rest = xxhash.xxh3_64()
    buffer = np.empty(_BUFFER_BYTES, np.uint8)
    try:
        with closing(folder.open(file.name)) as opened:
            for extent in extents:
                hashed = xxhash.xxh3_64()
                whole = True
                for first in range(extent.first, extent.last, _BUFFER_BYTES):
                    memory = buffer[: min(_BUFFER_BYTES, extent.last - first)]
                    if (count := opened.read_into(memory.data, first)) < len(memory):
                        raise CheckpointError(f"it ends at byte {first + count}")
                    progress(len(memory))
                    if extent.gap:
                        whole = whole and not memory.any()
                    else:
                        (rest if extent.checksum is None else hashed).update(memory.data)
                if extent.gap and not whole:
                    found.append(Damage(file.name, extent.first, extent.last, None, "not zero, as between blocks"))
                if extent.checksum is not None and hashed.hexdigest() != extent.checksum:
                    found.append(
                        Damage(file.name, extent.first, extent.last, extent.tensor, "its checksum does not match")
                    )
    except (OSError, CheckpointError) as error:
        found.append(Damage(file.name, 0, file.nbytes, None, f"cannot be read: {error}"))
        return found
    if file.rest is not None and rest.hexdigest() != file.rest:
        found.append(
            Damage(file.name, 0, file.nbytes, None, "the checksum of what is outside its tensors does not match")
        )
    return found


def _extents(file: File, inside: Iterable[tuple[Tensor, StoredBlock]], chunk_bytes: int) -> Iterator[_ByteRange]:
    """All byte ranges of a file, in order. `inside`: its blocks."""
    blocks: dict[str, list[tuple[int, int, str, StoredBlock]]] = {dtype: [] for dtype in file.datasets}
    for tensor, block in inside:
        blocks[tensor.dtype].append((block.start, block.box.size, tensor.name, block))
    at = 0
    for dtype, dataset in sorted(file.datasets.items(), key=lambda item: item[1].offset_bytes):
        itemsize = DTYPES[dtype].itemsize
        yield _ByteRange(at, dataset.offset_bytes)
        at = dataset.offset_bytes
        for start, size, name, block in sorted(blocks[dtype]):
            first, last = dataset.offset_bytes + start * itemsize, dataset.offset_bytes + (start + size) * itemsize
            yield _ByteRange(at, first, gap=True)
            for i, begin in enumerate(range(first, last, chunk_bytes)):
                yield _ByteRange(begin, min(begin + chunk_bytes, last), name, block.checksum(i))
            at = last
        end = dataset.offset_bytes + dataset.elements * itemsize
        yield _ByteRange(at, end, gap=True)
        at = end
    yield _ByteRange(at, file.nbytes)
