"""What a checkpoint on disk claims is believed only after it was checked here: it may be damaged, or made to harm.

Nothing read runs as code, files are plain names of regular files inside the checkpoint's folder, every byte range lies inside
its file, and no tensor is larger than the files that hold it.
"""

import json
import math
import os
import stat
import sys
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from ckpt.layout import Box, Shape, cover_error
from ckpt.manifest import (
    FILE_NAME,
    FORMAT,
    MAX_NDIM,
    VERSION,
    Block,
    CheckpointError,
    Dataset,
    File,
    Manifest,
    OutOfReachError,
    Tensor,
    axes_error,
    name_error,
    nesting_error,
)
from collectives.dtypes import TABLE

_MAX_SIZE = 1 << 62


class Header(NamedTuple):
    """The first line of a manifest: enough to list a folder."""

    sequence: int
    saved: float
    chunk_bytes: int
    num_tensors: int
    files: tuple[File, ...]


def decode(data: bytes) -> Manifest:
    """The manifest in `data`, every claim of it checked. CheckpointError if it is damaged, inconsistent or newer than this reader."""
    lines = verified_lines(data)
    header = decode_header(lines[0])
    if len(lines) != 2 + header.num_tensors:
        raise _refused(f"it has {len(lines) - 2} tensors, its header says {header.num_tensors}")
    meta = _object(lines[1])
    tensors: dict[str, Tensor] = {}
    for line in lines[2:]:
        tensor = _tensor(_object(line), header)
        if tensor.name in tensors:
            raise _refused(f"tensor {tensor.name!r} appears twice")
        tensors[tensor.name] = tensor
    if problem := nesting_error(tensors):
        raise _refused(problem)
    _check_no_sharing(header.files, tensors.values())
    return Manifest(header.files, tensors, meta, header.sequence, header.saved, header.chunk_bytes)


def verified_lines(data: bytes) -> list[bytes]:
    """The lines of a manifest without the last, whose checksum they match; CheckpointError otherwise."""
    lines = data.split(b"\n")
    if len(lines) < 4 or lines[-1]:
        raise _refused("it is cut off")
    # A newer format may end otherwise: say "newer" rather than "damaged" where the header still can be read.
    decode_header(lines[0])
    body = len(data) - len(lines[-2]) - 1
    if lines[-2] != f'{{"xxh3":"{xxhash.xxh3_64_hexdigest(memoryview(data)[:body])}"}}'.encode():
        raise _refused("its checksum does not match: it is cut off or altered")
    return lines[:-2]


def decode_header(line: bytes) -> Header:
    """The checked first line of a manifest."""
    header = _object(line)
    if header.get("format") != FORMAT:
        refused = _out_of_reach if isinstance(header.get("format"), str) else _refused
        raise refused(f"its format is {header.get('format')!r:.40}, expected {FORMAT!r}")
    version = _int(header, "version", 1)
    if version > VERSION:
        raise _out_of_reach(
            f"it is of format version {version}, and this program reads up to {VERSION}: update mpitrain"
        )
    if header.get("byteorder") != sys.byteorder:
        raise _out_of_reach(
            f"it was written in byte order {header.get('byteorder')!r:.40}, this machine's is {sys.byteorder!r}"
        )
    saved = header.get("saved")
    if not isinstance(saved, int | float) or not math.isfinite(saved):
        raise _refused("its time is no number")
    chunk_bytes = _int(header, "chunk_bytes", 64, 1 << 30)
    if chunk_bytes % 64:
        raise _refused(f"chunk_bytes {chunk_bytes} is no multiple of 64")
    files = tuple(file_of(entry, version) for entry in _list(header, "files"))
    if len({f.name for f in files}) < len(files):
        raise _refused("it names a file twice")
    return Header(_int(header, "sequence"), float(saved), chunk_bytes, _int(header, "tensors"), files)


def check_files(path: Path, files: tuple[File, ...]) -> None:
    """CheckpointError unless every file is there, a regular one, and of the size the manifest names."""
    for file in files:
        try:
            status = os.lstat(path / file.name)
        except FileNotFoundError as error:
            raise CheckpointError(f"{file.name} is missing: {error.strerror}") from None
        except OSError as error:
            raise OutOfReachError(f"{file.name} cannot be looked at: {error.strerror}") from None
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{file.name} is no regular file: links and devices are not followed")
        if status.st_size != file.nbytes:
            raise CheckpointError(
                f"{file.name} has {status.st_size} bytes instead of {file.nbytes}: it is truncated or altered"
            )


def open_regular(path: Path) -> int:
    """A descriptor to read a regular file; OSError or CheckpointError for a link, and for a pipe instead of waiting for it."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CheckpointError(f"{path.name} is no regular file")
    return fd


def _refused(problem: str) -> CheckpointError:
    return CheckpointError(f"the manifest cannot be used: {problem}")


def _out_of_reach(problem: str) -> OutOfReachError:
    return OutOfReachError(f"the manifest cannot be used: {problem}")


def _object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _refused(f"a line is no JSON ({error})") from None
    if not isinstance(value, dict):
        raise _refused("a line is no JSON object")
    return value


def _int(entry: Mapping[str, Any], key: str, low: int = 0, high: int = _MAX_SIZE) -> int:
    value = entry.get(key)
    if type(value) is not int or not low <= value <= high:
        raise _refused(f"{key} is {value!r:.40}, expected an integer from {low} to {high}")
    return value


def _list(entry: Mapping[str, Any], key: str) -> list[Any]:
    value = entry.get(key)
    if not isinstance(value, list):
        raise _refused(f"{key} is {value!r:.40}, expected a list")
    return value


def _shape(entry: Mapping[str, Any], key: str) -> Shape:
    values = _list(entry, key)
    if len(values) > MAX_NDIM or not _are_sizes(values):
        raise _refused(f"{key} is {values!r:.60}, expected at most {MAX_NDIM} sizes")
    return tuple(values)


def _are_sizes(values: list[Any]) -> bool:
    return all(type(n) is int and 0 <= n <= _MAX_SIZE for n in values)


def file_of(entry: Any, version: int = VERSION) -> File:
    """The checked entry of a file in a manifest's header."""
    name = entry.get("name") if isinstance(entry, dict) else None
    if (
        not isinstance(name, str)
        or not name.isprintable()
        or name in ("", ".", "..", FILE_NAME)
        or "/" in name
        or "\\" in name
    ):
        raise _refused(f"the file name {name!r:.60} is no plain name inside the checkpoint")
    nbytes = _int(entry, "bytes")
    listed = entry.get("datasets")
    if not isinstance(listed, dict):
        raise _refused(f"file {name}: datasets is no JSON object")
    datasets = {}
    for dtype, value in listed.items():
        if dtype not in TABLE:
            raise _refused(f"file {name}: dtype {dtype!r:.40} is unknown")
        if not isinstance(value, list) or len(value) != 2 or not _are_sizes(value):
            raise _refused(f"file {name}: dataset {dtype} is {value!r:.60}, expected an offset and a length")
        datasets[dtype] = Dataset(*value)
    end = 0
    for dtype, (offset, elements) in sorted(datasets.items(), key=lambda item: item[1]):
        if offset < end:
            raise _refused(f"file {name}: dataset {dtype} overlaps another")
        end = offset + elements * TABLE[dtype].itemsize
    if end > nbytes:
        raise _refused(f"file {name}: its datasets end at byte {end}, beyond its {nbytes} bytes")
    if version == 1:
        return File(name, nbytes, datasets)
    rest = entry.get("rest")
    if not isinstance(rest, str) or len(rest) != 16:
        raise _refused(f"file {name}: the checksum of the rest is {rest!r:.40}")
    return File(name, nbytes, datasets, *_checksums(rest, f"file {name}"))


def _tensor(entry: dict[str, Any], header: Header) -> Tensor:
    name = entry.get("name")
    if problem := name_error(name):
        raise _refused(problem)
    assert isinstance(name, str)
    dtype = entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in TABLE:
        raise _refused(f"tensor {name!r}: dtype {dtype!r:.40} is unknown")
    shape = _shape(entry, "shape")
    blocks = tuple(_block(name, dtype, shape, value, header) for value in _list(entry, "blocks"))
    # An exact cover by blocks that share no bytes: so no tensor is larger than the files that hold it.
    problem = cover_error(shape, [b.box for b in blocks], [header.files[b.file].name for b in blocks])
    if problem:
        raise _refused(f"tensor {name!r}: {problem}")
    return Tensor(name, dtype, shape, blocks, _axes(name, shape, entry.get("axes")))


def _axes(name: str, shape: Shape, value: Any) -> tuple[str | None, ...] | None:
    if value is None:
        return None
    if problem := axes_error(value, len(shape)):
        raise _refused(f"tensor {name!r}: {problem}")
    return tuple(value)


def _block(name: str, dtype: str, shape: Shape, entry: Any, header: Header) -> Block:
    if not isinstance(entry, dict):
        raise _refused(f"tensor {name!r}: a block is no JSON object")
    file = _int(entry, "file", 0, len(header.files) - 1)
    start = _int(entry, "start")
    offset, sizes = _shape(entry, "offset"), _shape(entry, "shape")
    box = Box(offset, sizes)
    if not box.inside(shape) or not box.size:
        raise _refused(f"tensor {name!r}: a block of {sizes} at {offset} does not lie inside the shape {shape}")
    dataset = header.files[file].datasets.get(dtype)
    if dataset is None or start + box.size > dataset.elements:
        raise _refused(f"tensor {name!r}: block {box} lies beyond its dataset in {header.files[file].name}")
    digits = entry.get("xxh3")
    num_chunks = -(-box.size * TABLE[dtype].itemsize // header.chunk_bytes)
    if not isinstance(digits, str) or len(digits) != 16 * num_chunks:
        raise _refused(f"tensor {name!r}: block {box} has the wrong number of checksums")
    return Block(file, start, box, _checksums(digits, f"tensor {name!r}"))


def _checksums(digits: str, where: str) -> tuple[int, ...]:
    try:
        return tuple(int.from_bytes(bytes.fromhex(digits[i : i + 16])) for i in range(0, len(digits), 16))
    except ValueError:
        raise _refused(f"{where}: a checksum is no number") from None


def _check_no_sharing(files: tuple[File, ...], tensors: Iterable[Tensor]) -> None:
    ranges: dict[tuple[int, str], list[tuple[int, int, str]]] = {}
    for tensor in tensors:
        for block in tensor.blocks:
            taken = (block.start, block.start + block.box.size, tensor.name)
            ranges.setdefault((block.file, tensor.dtype), []).append(taken)
    for (file, _), in_order in ranges.items():
        in_order.sort()
        for (_, end, name), (start, _, other) in pairwise(in_order):
            if start < end:
                raise _refused(f"tensors {name!r} and {other!r} share bytes of {files[file].name}")
