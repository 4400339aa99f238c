"""Every byte of a checkpoint against what the manifest says of it: see [Note: every byte] in manifest.py."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import NamedTuple

import numpy as np
import xxhash

from ckpt.folder import parse_manifest, read_manifest
from ckpt.manifest import CheckpointError, Manifest
from ckpt.places import OpenFile, Place, absolute, open_file
from collectives.dtypes import TABLE

_BUFFER_BYTES = 4 << 20


class Damage(NamedTuple):
    """Bytes `first` up to `last` of a file that are not what was written; `tensor`: whose they are, None if nobody's."""

    file: str
    first: int
    last: int
    tensor: str | None
    problem: str

    def __str__(self) -> str:
        whose = "" if self.tensor is None else f", of tensor {self.tensor!r}"
        return f"{self.file}, bytes {self.first} to {self.last}{whose}: {self.problem}"


class _Piece(NamedTuple):
    """A run of bytes of a file. `checksum`: of a chunk of a block; None: to be hashed with the rest, or zero in a `gap`."""

    first: int
    last: int
    tensor: str | None = None
    checksum: int | None = None
    gap: bool = False


def verify(path: str | os.PathLike[str], *, threads: int | None = None) -> list[Damage]:
    """All damage in the checkpoint `path`, none of which a reader has to come across; an empty list if it is whole.

    Reads every file once, `threads` at a time (None: as many as cores), in 4 MiB of memory each. CheckpointError if the manifest
    cannot be used, or a file is missing or of another size: then nothing more can be said.
    """
    folder = absolute(path)
    manifest = parse_manifest(folder, read_manifest(folder))
    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        found = pool.map(lambda number: verify_file(folder, manifest, number), range(len(manifest.files)))
        return [damage for of_file in found for damage in of_file]


def verify_file(folder: Place, manifest: Manifest, number: int) -> list[Damage]:
    """All damage in the manifest's file of that number; what cannot be read at all is damage, too."""
    file = manifest.files[number]
    found = []
    rest = xxhash.xxh3_64()
    buffer = np.empty(_BUFFER_BYTES, np.uint8)
    try:
        with closing(open_file(folder / file.name)) as opened:
            for piece in _pieces(manifest, number):
                hashed = xxhash.xxh3_64()
                whole = True
                for first in range(piece.first, piece.last, _BUFFER_BYTES):
                    memory = buffer[: min(_BUFFER_BYTES, piece.last - first)]
                    _read(opened, memory.data, first)
                    if piece.gap:
                        whole = whole and not memory.any()
                    else:
                        (rest if piece.checksum is None else hashed).update(memory.data)
                if piece.gap and not whole:
                    found.append(Damage(file.name, piece.first, piece.last, None, "not zero, as between blocks"))
                if piece.checksum is not None and hashed.intdigest() != piece.checksum:
                    found.append(
                        Damage(file.name, piece.first, piece.last, piece.tensor, "its checksum does not match")
                    )
    except (OSError, CheckpointError) as error:
        found.append(Damage(file.name, 0, file.nbytes, None, f"cannot be read: {error}"))
        return found
    if file.rest is not None and rest.intdigest() != file.rest:
        found.append(
            Damage(file.name, 0, file.nbytes, None, "the checksum of what is outside its tensors does not match")
        )
    return found


def _pieces(manifest: Manifest, number: int) -> Iterator[_Piece]:
    """A file from its first byte to its last."""
    file = manifest.files[number]
    blocks: dict[str, list[tuple[int, int, str, tuple[int, ...]]]] = {dtype: [] for dtype in file.datasets}
    for tensor in manifest.tensors.values():
        for block in tensor.blocks:
            if block.file == number:
                blocks[tensor.dtype].append((block.start, block.box.size, tensor.name, block.checksums))
    at = 0
    for dtype, dataset in sorted(file.datasets.items(), key=lambda item: item[1].offset_bytes):
        itemsize = TABLE[dtype].itemsize
        yield _Piece(at, dataset.offset_bytes)
        at = dataset.offset_bytes
        for start, size, name, checksums in sorted(blocks[dtype]):
            first, last = dataset.offset_bytes + start * itemsize, dataset.offset_bytes + (start + size) * itemsize
            yield _Piece(at, first, gap=True)
            for i, checksum in enumerate(checksums):
                begin = first + i * manifest.chunk_bytes
                yield _Piece(begin, min(begin + manifest.chunk_bytes, last), name, checksum)
            at = last
        end = dataset.offset_bytes + dataset.elements * itemsize
        yield _Piece(at, end, gap=True)
        at = end
    yield _Piece(at, file.nbytes)


def _read(opened: OpenFile, memory: memoryview, position: int) -> None:
    count = opened.read_into(memory, position)
    if count < len(memory):
        raise CheckpointError(f"it ends at byte {position + count}")
