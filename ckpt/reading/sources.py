"""Tensors that are copied between files: one piece at a time, in flat order, so that memory is bounded for tensors of any size."""

import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np

from ckpt.format.boxes import Box, Shape, flat_index, rectangles
from ckpt.format.errors import naming
from ckpt.format.manifest import Tensor, named, unmatched_error
from ckpt.reading.reader import Reader
from ckpt.storage.local import pwrite_all
from ckpt.storage.local_path import LocalFile
from ckpt.storage.progress import Progress
from collectives.arrays.dtypes import DTYPES

PIECE_BYTES = 32 << 20  # in memory at a time; a multiple of checksums' chunks and of elements

Read = Callable[[int, int], memoryview]
"""The bytes of elements `begin:end` of a tensor, in flat order: at most `PIECE_BYTES`, valid until the next call."""


@dataclass(frozen=True)
class Source:
    """A tensor that can be read in flat order. `read` raises CheckpointError or OSError that names the file."""

    name: str
    dtype: str
    shape: Shape
    read: Read
    axes: tuple[str | None, ...] | None = None

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    def watched(self, progress: Progress) -> "Source":
        """The same source, which calls `progress` with the number of bytes of each read."""

        def read(begin: int, end: int) -> memoryview:
            piece = self.read(begin, end)
            progress(len(piece))
            return piece

        return replace(self, read=read)

    def pieces(self) -> Iterator[memoryview]:
        """The whole tensor in pieces of `PIECE_BYTES`. Each piece is valid until the next one."""
        return self.chunks(PIECE_BYTES)

    def chunks(self, nbytes: int, begin: int = 0, end: int | None = None) -> Iterator[memoryview]:
        """Elements `begin:end`, or all, in chunks of `nbytes`, a divisor of `PIECE_BYTES`, and the rest. See `pieces`."""
        assert PIECE_BYTES % nbytes == 0
        step = PIECE_BYTES // DTYPES[self.dtype].itemsize
        end = prod(self.shape) if end is None else end
        for first in range(begin, end, step):
            piece = self.read(first, min(first + step, end))
            for at in range(0, len(piece), nbytes):
                yield piece[at : at + nbytes]


@dataclass(frozen=True)
class SourcePart:
    """A box of whole rows of a source, which is one run in flat order."""

    source: Source
    box: Box

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def dtype(self) -> str:
        return self.source.dtype

    def chunks(self, nbytes: int) -> Iterator[memoryview]:
        """The bytes of the box in chunks: see `Source.chunks`."""
        begin = flat_index(self.box.offset, self.source.shape)
        return self.source.chunks(nbytes, begin, begin + self.box.size)


class PieceBuffer:
    """Memory for one piece, which all sources of a copy share."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def __call__(self, nbytes: int) -> np.ndarray:
        """The first `nbytes` of the memory."""
        if self._bytes.size < nbytes:
            self._bytes = np.empty(0, np.uint8)  # free the old memory first
            self._bytes = np.empty(nbytes, np.uint8)
        return self._bytes[:nbytes]


def _of_boxes(
    name: str, dtype: str, shape: Shape, buffer: PieceBuffer, fill: Callable[[np.ndarray, Box], object]
) -> Source:
    """A source for a tensor of which `fill` copies a box into an array."""
    kind = DTYPES[dtype].numpy

    def read(begin: int, end: int) -> memoryview:
        flat = buffer((end - begin) * kind.itemsize)
        elements, at = flat.view(kind), 0
        for box in rectangles(shape, begin, end):
            fill(elements[at : at + box.size].reshape(box.shape), box)
            at += box.size
        return flat.data

    return Source(name, dtype, shape, read)


def from_checkpoint(reader: Reader, tensor: Tensor, name: str, buffer: PieceBuffer) -> Source:
    """A source for a stored tensor, with the new name `name`."""
    source = _of_boxes(name, tensor.dtype, tensor.shape, buffer, lambda out, box: reader.fill(out, tensor, box))
    return replace(source, axes=tensor.axes)


def from_array(
    array: np.ndarray,
    name: str,
    dtype: str,
    buffer: PieceBuffer,
    change: Callable[[np.ndarray], np.ndarray] = lambda piece: piece,
) -> Source:
    """A source for an array in memory or mapped from a file, with any strides. `change`: makes the elements of what is there."""
    return _of_boxes(name, dtype, array.shape, buffer, lambda out, box: np.copyto(out, change(array[box.slices])))


def from_file(
    file: LocalFile, position: int, path: str, name: str, dtype: str, shape: Shape, buffer: PieceBuffer
) -> Source:
    """A source for a tensor whose bytes lie in flat order in the open file `file` from byte `position` on. `path`: the file's name."""
    itemsize = DTYPES[dtype].itemsize

    def read(begin: int, end: int) -> memoryview:
        memory, start = buffer((end - begin) * itemsize).data, position + begin * itemsize
        with naming(Path(path)):
            if (count := file.read_into(memory, start)) < len(memory):
                raise OSError(errno.EIO, f"it ends at byte {start + count}, before its data", path)
        return memory

    return Source(name, dtype, shape, read)


def matching(names: Sequence[str], only: str | Sequence[str] | None) -> list[str]:
    """The names that the pattern `only`, or one of several, matches; None: all. ValueError if a pattern matches no name."""
    if problem := unmatched_error(names, only):
        raise ValueError(problem)
    return named(names, only)


def write_all(fd: int, source: Source, position: int) -> None:
    """Write a source to an open file, from byte `position` on."""
    for piece in source.pieces():
        pwrite_all(fd, piece, position)
        position += len(piece)
