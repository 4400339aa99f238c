"""Validation: every statement in a manifest is checked here before use, because a checkpoint may be damaged or malicious.

No data run as code. File names are plain names. Every byte range lies inside its file. No tensor is larger than the files that
hold it. The time and memory for all checks grow only with the bytes of the manifest. local_path.py opens the files safely.
"""

import io
import json
import math
import reprlib
import sys
from collections import defaultdict
from collections.abc import Iterable
from itertools import islice, pairwise
from typing import Annotated, Any, TypeVar

import msgspec

from ckpt.format.boxes import cover_error
from ckpt.format.manifest import (
    DIGITS,
    FILE_NAME,
    FORMAT,
    MAX_BYTES,
    MAX_LINE_VALUES,
    VERSION,
    CheckpointError,
    File,
    Manifest,
    OutOfReachError,
    Size,
    StoredBlock,
    Tensor,
    axes_error,
    last_line,
    line_error,
    name_error,
    nesting_error,
    order_of,
    shape_error,
)
from collectives.arrays.dtypes import DTYPES

_MAX_CHUNK_BYTES = 16 << 20  # limits the memory for reading a part of a chunk
_MAX_REST_BYTES = 64 << 20
_MAX_RELEASE = 200  # characters
_MAX_GAP_BYTES = 1 << 20  # between blocks; a save leaves at most a page, file systems' stripes may need more

T = TypeVar("T")


class Header(msgspec.Struct, frozen=True):
    """The first line of a manifest, which is enough to list a folder."""

    sequence: Size
    saved: Annotated[float, msgspec.Meta(gt=-1e300, lt=1e300)]
    chunk_bytes: Annotated[int, msgspec.Meta(ge=64, le=_MAX_CHUNK_BYTES, multiple_of=64)]
    num_tensors: Size = msgspec.field(name="tensors")
    files: tuple[File, ...]
    num_ranks: Size = msgspec.field(name="ranks", default=0)
    told_release: Any = msgspec.field(name="release", default="")

    @property
    def order(self) -> tuple[int, float]:
        """The place among the checkpoints of a folder: see `order_of`."""
        return order_of(self.sequence, self.saved)

    @property
    def release(self) -> str:
        """The release that wrote it; "" if it is unknown. No reading depends on it, so an odd value is no damage."""
        told = self.told_release
        return told if isinstance(told, str) and len(told) <= _MAX_RELEASE and told.isprintable() else ""


def decode(data: bytes) -> Manifest:
    """The manifest in `data`, completely checked. CheckpointError if it is damaged, inconsistent or newer than this reader."""
    header = verified_header(data)
    # One line at a time, so that only this line is in memory twice.
    lines = islice(io.BytesIO(data), 1, 2 + header.num_tensors)
    meta = _object(next(lines))
    tensors: dict[str, Tensor] = {}
    for line in lines:
        tensor = _tensor(line, header)
        if tensor.name in tensors:
            raise refused(f"tensor {tensor.name!r} appears twice")
        tensors[tensor.name] = tensor
    if problem := nesting_error(tensors):
        raise refused(problem)
    _check_no_sharing(header.files, tensors.values())
    _check_rest(header.files, len(data))
    return Manifest(
        header.files, tensors, meta, header.sequence, header.saved, header.chunk_bytes,
        num_ranks=header.num_ranks, release=header.release,
    )  # fmt: skip


def check_readable(data: bytes) -> None:
    """ValueError unless `decode` reads the manifest `data`: a writer calls it before its checkpoint exists."""
    try:
        if len(data) > MAX_BYTES:
            raise refused(f"it has {len(data)} bytes, expected at most {MAX_BYTES}")
        decode(data)
    except CheckpointError as error:
        raise ValueError(f"no reader would take this checkpoint, so it is not saved: {error}") from None


def verified_header(data: bytes) -> Header:
    """The header of the manifest `data`. CheckpointError if the checksum in the last line does not match."""
    lines = data.count(b"\n")
    if lines < 3 or not data.endswith(b"\n"):
        raise refused("it is cut off")
    # A newer format may have another end: report "newer", not "damaged", if the header can be read.
    header = decode_header(data[: data.index(b"\n")])
    body = data.rindex(b"\n", 0, -1) + 1
    if data[body:] != last_line(memoryview(data)[:body]):
        raise refused("its checksum does not match: it is cut off or altered")
    if lines != 3 + header.num_tensors:
        raise refused(f"it has {lines - 3} tensors, its header says {header.num_tensors}")
    return header


def decode_header(line: bytes) -> Header:
    """The checked first line of a manifest."""
    header = _object(line)
    if header.get("format") != FORMAT:
        problem = f"its format is {reprlib.repr(header.get('format'))}, expected {FORMAT!r}"
        raise out_of_reach(problem) if isinstance(header.get("format"), str) else refused(problem)
    version = _typed(header, _Version).version  # checked first, because a newer header may have other types
    if version > VERSION:
        raise out_of_reach(
            f"it is of format version {version}, and this program reads up to {VERSION}: update mpitrain"
        )
    if header.get("byteorder") != sys.byteorder:
        raise out_of_reach(
            f"it was written in byte order {reprlib.repr(header.get('byteorder'))}, this machine's is {sys.byteorder!r}"
        )
    checked = _typed(header, Header)
    for file in checked.files:
        _check_file(file, version)
    if len({file.name for file in checked.files}) < len(checked.files):
        raise refused("it names a file twice")
    return checked


def refused(problem: str) -> CheckpointError:
    """The error for a manifest with that problem."""
    return CheckpointError(f"the manifest cannot be used: {problem}")


def out_of_reach(problem: str) -> OutOfReachError:
    """The error for a manifest with that problem, which may be undamaged."""
    return OutOfReachError(f"the manifest cannot be used: {problem}")


def _object(line: bytes) -> dict[str, Any]:
    if problem := line_error(line):
        raise out_of_reach(f"it {problem}")
    try:
        value = _JSON.decode(line.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise refused(f"a line is no JSON ({error})") from None
    if not isinstance(value, dict):
        raise refused("a line is no JSON object")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Some programs take the first of two values, others the last.
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice")
    return found


_JSON = json.JSONDecoder(object_pairs_hook=_distinct)


class _Version(msgspec.Struct):
    version: Annotated[int, msgspec.Meta(ge=1)]


def converted(value: Any, kind: type[T]) -> T:
    """`value`, which came from JSON, as the type `kind` of msgspec. ValueError with the place of what is wrong."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # msgspec refuses half of a surrogate pair
        raise ValueError(str(error)) from None


def _typed(value: Any, kind: type[T]) -> T:
    try:
        return converted(value, kind)
    except ValueError as error:
        raise refused(f"its header: {error}") from None


def file_of(entry: Any) -> File:
    """The checked entry of a file in a manifest's header."""
    file = _typed(entry, File)
    _check_file(file, VERSION)
    return file


def _check_file(file: File, version: int) -> None:
    name = file.name
    if not name.isprintable() or name in ("", ".", "..", FILE_NAME) or "/" in name or "\\" in name:
        raise refused(f"the file name {reprlib.repr(name)} is no plain name inside the checkpoint")
    if unknown := file.datasets.keys() - DTYPES.keys():
        raise refused(f"file {name}: dtype {reprlib.repr(min(unknown))} is unknown")
    end = 0
    for dtype, (offset, elements) in sorted(file.datasets.items(), key=lambda item: item[1]):
        if offset < end:
            raise refused(f"file {name}: dataset {dtype} overlaps another")
        end = offset + elements * DTYPES[dtype].itemsize
    if end > file.nbytes:
        raise refused(f"file {name}: its datasets end at byte {end}, beyond its {file.nbytes} bytes")
    if (version > 1 or file.rest is not None) and not _are_checksums(file.rest or "", 1):
        raise refused(f"file {name}: rest is {reprlib.repr(file.rest)}, expected a checksum of {DIGITS} digits")


_ITEMSIZES = {name: row.itemsize for name, row in DTYPES.items()}

# Of two equal keys in a line the last one is used; unknown keys are skipped without memory.
_TENSOR = msgspec.json.Decoder(Tensor)


def _tensor(line: bytes, header: Header) -> Tensor:
    if len(line) > MAX_LINE_VALUES and (problem := line_error(line)):
        raise out_of_reach(f"it {problem}")
    try:
        tensor = _TENSOR.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise refused(f"the line of a tensor, {line[:60]!r}...: {error}") from None
    name, shape, blocks = tensor.name, tensor.shape, tensor.blocks
    if problem := name_error(name):
        raise refused(problem)
    if (itemsize := _ITEMSIZES.get(tensor.dtype)) is None:
        raise refused(f"tensor {name!r}: dtype {reprlib.repr(tensor.dtype)} is unknown")
    if 0 in shape and (problem := shape_error(shape, itemsize)):  # other shapes are those of the blocks
        raise refused(f"tensor {name!r}: {problem}")
    for block in blocks:
        if problem := _block_error(block, tensor.dtype, itemsize, header):
            raise refused(f"tensor {name!r}: a block of {block.shape} at {block.offset} {problem}")
    # The blocks are an exact cover and share no bytes, so no tensor is larger than the files that hold it.
    is_one = len(blocks) == 1 and blocks[0].shape == shape and blocks[0].offset == (0,) * len(shape)
    if not is_one and (
        problem := cover_error(
            shape, [(b.offset, b.shape) for b in blocks], lambda i: header.files[blocks[i].file].name
        )
    ):
        raise refused(f"tensor {name!r}: {problem}")
    if tensor.axes is not None and (problem := axes_error(list(tensor.axes), len(shape))):
        raise refused(f"tensor {name!r}: {problem}")
    return tensor


def _block_error(block: StoredBlock, dtype: str, itemsize: int, header: Header) -> str | None:
    """The reason why a block is refused, or None. `cover_error` checks that it lies inside its tensor."""
    size = math.prod(block.shape)
    if not size:
        return "is empty"
    if block.file >= len(header.files):
        return f"is in file {block.file} of {len(header.files)}"
    file = header.files[block.file]
    dataset = file.datasets.get(dtype)
    if dataset is None or block.start + size > dataset.elements:
        return f"lies beyond its dataset in {file.name}"
    if not _are_checksums(block.checksums, -(-size * itemsize // header.chunk_bytes)):
        return "has checksums of the wrong number or length, or a value that is no checksum"
    return None


def _are_checksums(digits: str, count: int) -> bool:
    """Whether `digits` are `count` checksums."""
    try:
        int(digits, 16)
    except ValueError:
        return False
    return len(digits) == DIGITS * count


def _check_no_sharing(files: tuple[File, ...], tensors: Iterable[Tensor]) -> None:
    ranges: dict[tuple[int, str], list[tuple[int, int, str]]] = defaultdict(list)
    for tensor in tensors:
        for block in tensor.blocks:
            ranges[block.file, tensor.dtype].append((block.start, block.start + math.prod(block.shape), tensor.name))
    for (file, dtype), in_order in ranges.items():
        in_order.sort()
        # The verification of all bytes of a sparse file could take years.
        gaps = files[file].datasets[dtype].elements - sum(end - start for start, end, _ in in_order)
        if gaps * DTYPES[dtype].itemsize > _MAX_GAP_BYTES * (1 + len(in_order)):
            raise refused(f"dataset {dtype} of {files[file].name} has {gaps} elements that belong to no tensor")
        for (_, end, name), (start, _, other) in pairwise(in_order):
            if start < end:
                raise refused(f"tensors {name!r} and {other!r} share bytes of {files[file].name}")


def _check_rest(files: tuple[File, ...], manifest_bytes: int) -> None:
    """Limit HDF5's own bytes: like the manifest, they grow with the numbers of tensors and blocks."""
    for file in files:
        rest = file.nbytes - sum(d.elements * DTYPES[dtype].itemsize for dtype, d in file.datasets.items())
        if rest > _MAX_REST_BYTES + 1000 * manifest_bytes:
            raise refused(f"file {file.name} has {rest} bytes outside its datasets")
