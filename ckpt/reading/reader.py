"""Copies boxes of stored tensors into arrays: raw bytes by the manifest, never through HDF5 or its virtual datasets.

A virtual dataset whose source is missing reads as fill values without an error; this reader checks everything. It reads directly into
the target if the bytes have the same order there. Otherwise it copies each chunk through a buffer, so that memory is bounded for
tensors of any size.
"""

from collections.abc import Iterator
from math import prod
from types import TracebackType

import numpy as np

from ckpt.format.boxes import Box, flat_index, rectangles, single_run
from ckpt.format.manifest import CheckpointError, Manifest, StoredBlock, Tensor, checksum
from ckpt.storage.places import Folder, OpenFile, Place, read_header
from collectives.arrays.dtypes import DTYPES

_MAX_OPEN_FILES = 64


def is_replaced(folder: Place, ours: Manifest) -> bool:
    """Whether another save has replaced the checkpoint `folder` since `ours` was read. CheckpointError or OSError if unreadable."""
    header = read_header(folder)
    return (header.sequence, header.saved, header.files) != (ours.sequence, ours.saved, ours.files)


class Reader:
    """The files of one checkpoint, opened when needed. A context manager: its end closes them."""

    def __init__(self, folder: Place, manifest: Manifest, *, verify: bool) -> None:
        self._folder = folder
        self._manifest = manifest
        self._verify = verify
        self._opened: Folder | None = None
        self._files: dict[int, OpenFile] = {}
        self._chunk_buffer = np.empty(0, np.uint8)

    def __enter__(self) -> "Reader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._files:
            self._files.popitem()[1].close()
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def fill(self, target: np.ndarray, tensor: Tensor, box: Box) -> None:
        """Copy `box` of `tensor` into `target`: contiguous, of the box's shape and the tensor's dtype.

        CheckpointError, with `target` partly overwritten, if a file is missing, cut off or damaged.
        """
        assert target.shape == box.shape and target.dtype == DTYPES[tensor.dtype].numpy and target.flags.c_contiguous
        memory = target.reshape(-1).view(np.uint8).data
        itemsize = target.dtype.itemsize
        try:
            for block in tensor.blocks:
                if block.offset == box.offset and block.shape == box.shape:  # the box of a save
                    self._copy_run(memory, tensor, block, 0)
                    return
            for block in tensor.blocks:
                if (inner := block.box.intersect(box)) is None:
                    continue
                elif single_run(inner, block.shape, box.shape):
                    start = flat_index(inner.relative_to(block.offset).offset, block.shape) * itemsize
                    at = flat_index(inner.relative_to(box.offset).offset, box.shape) * itemsize
                    self._copy_run(memory[at : at + inner.size * itemsize], tensor, block, start)
                else:
                    self._copy_rectangles(target, tensor, block, inner, box)
        except CheckpointError as error:
            raise self._failure(tensor, error) from None

    def elements(self, tensor: Tensor) -> Iterator[np.ndarray]:
        """Each element of `tensor` once, in the order of the files, a 1-D array per chunk, valid until the next one.

        CheckpointError: see `fill`.
        """
        dtype = DTYPES[tensor.dtype].numpy
        try:
            for block in tensor.blocks:
                position = self._position(tensor, block)
                for i, first, last in self._chunks(tensor, block, 0, block.box.size * dtype.itemsize):
                    buffer = self._buffer(last - first)
                    self._read_chunk(block, i, position + first, buffer)
                    yield np.frombuffer(buffer, np.uint8).view(dtype)
        except CheckpointError as error:
            raise self._failure(tensor, error) from None

    def _failure(self, tensor: Tensor, error: CheckpointError) -> CheckpointError:
        """The error for a problem with a file. It says if another save has replaced the checkpoint."""
        try:
            if is_replaced(self._folder, self._manifest):
                return CheckpointError(
                    f"{self._folder} was replaced by another save since it was opened: open it again"
                )
        except (CheckpointError, OSError):
            if not self._folder.is_there():
                return CheckpointError(f"{self._folder} was removed since it was opened")
        return CheckpointError(f"{self._folder}: tensor {tensor.name!r}: {error}")

    def _copy_run(self, memory: memoryview, tensor: Tensor, block: StoredBlock, start: int) -> None:
        """Fill `memory` with the bytes of the block from byte `start` on."""
        position = self._position(tensor, block)
        if not self._verify:
            self._read(block.file, position + start, memory)
            return
        stop = start + len(memory)
        for i, first, last in self._chunks(tensor, block, start, stop):
            if start <= first and last <= stop:
                self._read_chunk(block, i, position + first, memory[first - start : last - start])
            else:  # a checksum is of a whole chunk, so a part of one is read through the buffer
                buffer = self._buffer(last - first)
                self._read_chunk(block, i, position + first, buffer)
                low, high = max(start, first), min(stop, last)
                memory[low - start : high - start] = buffer[low - first : high - first]

    def _copy_rectangles(self, target: np.ndarray, tensor: Tensor, block: StoredBlock, inner: Box, box: Box) -> None:
        """Copy chunk by chunk through a buffer. A chunk is a few rectangles of the block; copy their intersections with `inner`."""
        itemsize = target.dtype.itemsize
        wanted = inner.relative_to(block.offset)
        last_wanted = tuple(o + n - 1 for o, n in zip(wanted.offset, wanted.shape, strict=True))
        start = flat_index(wanted.offset, block.shape) * itemsize
        stop = (flat_index(last_wanted, block.shape) + 1) * itemsize
        position = self._position(tensor, block)
        for i, first, last in self._chunks(tensor, block, start, stop):
            pieces = []
            begin = 0
            for rectangle in rectangles(block.shape, first // itemsize, last // itemsize):
                if part := rectangle.intersect(wanted):
                    pieces.append((begin, rectangle, part))
                begin += rectangle.size
            if not pieces:
                continue
            buffer = self._buffer(last - first)
            self._read_chunk(block, i, position + first, buffer)
            elements = np.frombuffer(buffer, np.uint8).view(target.dtype)
            for begin, rectangle, part in pieces:
                source = elements[begin : begin + rectangle.size].reshape(rectangle.shape)
                # The offset of the part in the target, from its offset in the block.
                there = Box(
                    tuple(p + b - t for p, b, t in zip(part.offset, block.offset, box.offset, strict=True)),
                    part.shape,
                )
                target[there.slices] = source[part.relative_to(rectangle.offset).slices]

    def _chunks(self, tensor: Tensor, block: StoredBlock, start: int, stop: int) -> list[tuple[int, int, int]]:
        """The block's chunks that overlap bytes `start:stop`: number, first byte, end."""
        size = self._manifest.chunk_bytes
        end = prod(block.shape) * DTYPES[tensor.dtype].numpy.itemsize
        return [(i, i * size, min((i + 1) * size, end)) for i in range(start // size, -(-stop // size))]

    def _read_chunk(self, block: StoredBlock, i: int, position: int, memory: memoryview) -> None:
        self._read(block.file, position, memory)
        # Hashed while it is still in the processor's cache.
        if self._verify and checksum(memory) != block.checksum(i):
            name = self._manifest.files[block.file].name
            raise CheckpointError(
                f"{name} is damaged: bytes {position} to {position + len(memory)} do not match their checksum"
            )

    def _position(self, tensor: Tensor, block: StoredBlock) -> int:
        dataset = self._manifest.files[block.file].datasets[tensor.dtype]
        return dataset.offset_bytes + block.start * DTYPES[tensor.dtype].numpy.itemsize

    def _buffer(self, nbytes: int) -> memoryview:
        if self._chunk_buffer.size < nbytes:
            self._chunk_buffer = np.empty(nbytes, np.uint8)
        return self._chunk_buffer.data[:nbytes]

    def _read(self, file: int, position: int, memory: memoryview) -> None:
        opened = self._files.get(file) or self._open(file)
        try:
            count = opened.read_into(memory, position)
        except OSError as error:
            name = self._manifest.files[file].name
            raise CheckpointError(f"{name} cannot be read: {error.strerror or error}") from error
        if count < len(memory):
            name = self._manifest.files[file].name
            raise CheckpointError(f"{name} ends at byte {position + count}, before its data: it is truncated")

    def _open(self, file: int) -> OpenFile:
        expected = self._manifest.files[file]
        try:
            if self._opened is None:
                self._opened = self._folder.open_folder()
                if not self._verify and is_replaced(self._folder, self._manifest):  # checksums would find it
                    raise CheckpointError("it belongs to another save")
            opened = self._opened.open(expected.name)
        except OSError as error:
            raise CheckpointError(f"{expected.name} cannot be opened: {error.strerror or error}") from None
        if len(self._files) >= _MAX_OPEN_FILES:
            self._files.pop(next(iter(self._files))).close()
        self._files[file] = opened
        if opened.nbytes != expected.nbytes:
            raise CheckpointError(
                f"{expected.name} has {opened.nbytes} bytes instead of {expected.nbytes}: it is truncated or altered"
            )
        return opened
