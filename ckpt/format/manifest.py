"""The manifest: the contents of a checkpoint, and the place of each byte.

`manifest.jsonl` has one JSON object per line. Line 1 is the header: format, version, files with their sizes and datasets. Line 2 is
the user's `meta`. Then follows one line per tensor, in the order of the names. The last line is the XXH3-64 of all bytes before it, so
a cut or altered manifest is always noticed, and a list of a folder only parses headers.

[Note: every byte] In a data file, each chunk of a block has a checksum; all bytes outside the datasets have one common checksum; the
bytes between the blocks of a dataset are zero. All bytes of the index are "outside". So no bit of a checkpoint can change unnoticed:
`verify` checks all bytes.

This module has the data types, the writing, and the rules for names. validation.py reads manifests.
"""

import difflib
import json
import math
import re
import reprlib
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from functools import lru_cache
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import msgspec
import xxhash

from ckpt.format.boxes import Box
from collectives.arrays.dtypes import DTYPES, MOVED

FORMAT = "mpitrain-ckpt"
# Raise the version if an older reader would misread the format; readers read all older versions and refuse newer ones. Version 3 added
# complex and float8 tensors; a checkpoint without these is written as version 2.
VERSION = 3
FILE_NAME = "manifest.jsonl"
CHUNK_BYTES = 4 << 20  # bytes per checksum, and the memory needed to verify a block of any size
MAX_NDIM = 32  # HDF5's limit
# A reader's memory for a manifest is about five times its bytes, and less than 64 MiB for any one line. A line has room for tensors of
# 30,000 blocks or 2 TiB, and for 40,000 files.
MAX_BYTES = 1 << 30
MAX_LINE_BYTES = 8 << 20
MAX_LINE_VALUES = 1 << 19
MAX_NAME = 1024
# Python's stack of 1000 calls, some of them used by the caller, limits the depth of JSON that it can read.
MAX_META_DEPTH = 400
_MAX_GROUPS, _MORE_GROUPS = 4, 1 << 14  # for each tensor, and more
_NO_NAMES = {"", ".", ".."}

_JSON = json.JSONEncoder(separators=(",", ":"))
_LINES = msgspec.json.Encoder()  # seven times as fast as `json`, for thousands of lines
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, of another format, or does not fit the request."""


class OutOfReachError(CheckpointError):
    """A checkpoint that cannot be used here, but may be undamaged: of a newer format, of another program, or without permission."""


# The limits of numbers are checked when a manifest is read.
MAX_SIZE = 1 << 62
Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_SIZE)]
# No folder gets so many checkpoints: a greater number is a stranger's.
MAX_SEQUENCE = 1 << 53
Sizes = Annotated[tuple[Size, ...], msgspec.Meta(max_length=MAX_NDIM)]


class Dataset(NamedTuple):
    """A 1-D dataset of a rank's file: its first byte in the file, and its length in elements."""

    offset_bytes: Size
    elements: Size


def checksum(data: memoryview | bytes) -> str:
    """XXH3-64 in the form of all checksums of a checkpoint: `DIGITS` hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


DIGITS = 16


class File(msgspec.Struct, frozen=True, omit_defaults=True):
    """One file of the checkpoint, with its contiguous datasets by the name of their dtype.

    `rest`: the checksum of all its bytes outside the datasets (HDF5's metadata), end to end. None in checkpoints of version 1.
    """

    name: str
    nbytes: Size = msgspec.field(name="bytes")
    datasets: dict[str, Dataset]
    rest: str | None = None


class StoredBlock(msgspec.Struct, gc=False):
    """A box of a tensor in a file: it begins at element `start` of the dataset with the name of the tensor's dtype.

    `file`: index into the manifest's files. `offset`, `shape`: of the box. `checksums`: the checksums of the block's chunks of
    `chunk_bytes`, end to end; empty until the block is written.
    """

    file: Size
    start: Size
    offset: Sizes
    shape: Sizes
    checksums: str = msgspec.field(name="xxh3")

    @property
    def box(self) -> Box:
        return Box(self.offset, self.shape)

    def checksum(self, i: int) -> str:
        """The checksum of chunk `i`."""
        return self.checksums[i * DIGITS : (i + 1) * DIGITS]


class Tensor(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """A tensor's line in the manifest: its name, the name of its dtype, its full shape, and the blocks that cover it exactly.

    `axes`: for each dimension the mesh axis along which it was cut, or None; None if the save gave no axes.
    """

    name: str
    dtype: str
    shape: Sizes
    axes: tuple[str | None, ...] | None = None
    blocks: tuple[StoredBlock, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Manifest:
    """The contents of a manifest. `sequence` counts the checkpoints of a folder, and gives their order without clocks. `num_ranks`: the
    ranks that saved it; 0 if unknown, as in older checkpoints, or if no ranks did. `release`: the version and commit of this library
    that wrote it; "" if unknown."""

    files: tuple[File, ...]
    tensors: Mapping[str, Tensor]
    meta: dict[str, Any] = field(default_factory=dict)
    sequence: int = 0
    saved: float = 0.0
    chunk_bytes: int = CHUNK_BYTES
    num_ranks: int = 0
    release: str = ""


def order_of(sequence: int, saved: float) -> tuple[int, float]:
    """The place of a checkpoint among those of its folder, to be compared. One with an absurd number comes before those that count."""
    return (sequence if sequence <= MAX_SEQUENCE else 0, saved)


def following(sequence: int) -> int:
    """The number of the checkpoint after the newest one. At the greatest number the times of the saves decide."""
    return min(sequence + 1, MAX_SEQUENCE)


def encode_meta(meta: Mapping[str, Any]) -> str:
    """`meta` as one line of JSON. TypeError if it is no JSON-like value; keys must be strings, because JSON would make them strings.

    ValueError if it is nested too deeply, for example contains itself, or is too large for a manifest: see `line_error`.
    """

    def check(value: Any, where: str, depth: int = 0) -> None:
        if depth > MAX_META_DEPTH:
            raise ValueError(f"{where[:60]}... is nested more than {MAX_META_DEPTH} deep, or holds itself")
        if isinstance(value, Mapping):
            for key, item in value.items():
                if not isinstance(key, str):
                    raise TypeError(f"{where} has the key {key!r}; JSON knows only strings as keys")
                check(item, f"{where}[{key!r}]", depth + 1)
        elif isinstance(value, list | tuple):
            for i, item in enumerate(value):
                check(item, f"{where}[{i}]", depth + 1)
        elif not (value is None or isinstance(value, str | int | float)):
            raise TypeError(
                f"{where} is a {type(value).__name__}; expected str, int, float, bool, None, or lists and dicts of them: convert a "
                "number of NumPy or torch by .item(), an array by .tolist(), or save it in tensors="
            )

    if not isinstance(meta, Mapping):
        raise TypeError(f"meta is a {type(meta).__name__}; expected a dict")
    check(meta, "meta")
    line = _JSON.encode(meta)
    if problem := line_error(line.encode()):
        raise ValueError(f"meta {problem}; save large values as tensors")
    return line


def line_error(line: bytes) -> str | None:
    """A message if this line is too large for a manifest, or None. Python's values need up to 30 times the memory of their text."""
    if len(line) <= MAX_LINE_VALUES:  # a value takes at least one byte
        return None
    if len(line) > MAX_LINE_BYTES:
        return f"is a line of {len(line)} bytes or more; expected at most {MAX_LINE_BYTES}"
    values = sum(map(line.count, (b"[", b"{", b",", b":")))
    return f"is a line of {values} values; expected at most {MAX_LINE_VALUES}" if values > MAX_LINE_VALUES else None


def version_of(tensors: Iterable[Tensor]) -> int:
    """The oldest version that supports all these tensors."""
    return VERSION if any(tensor.dtype in MOVED for tensor in tensors) else 2


def encode(manifest: Manifest) -> bytes:
    """The manifest as the bytes of its file. ValueError if it is larger than a reader accepts."""
    header = {
        "format": FORMAT,
        "version": version_of(manifest.tensors.values()),
        "byteorder": sys.byteorder,
        "sequence": manifest.sequence,
        "saved": manifest.saved,
        "chunk_bytes": manifest.chunk_bytes,
        "ranks": manifest.num_ranks,
        "release": manifest.release,
        "tensors": len(manifest.tensors),
        "files": [file_entry(file) for file in manifest.files],
    }
    first = f"{_JSON.encode(header)}\n{encode_meta(manifest.meta)}\n".encode()
    body = first + _in_ascii(_LINES.encode_lines([manifest.tensors[name] for name in sorted(manifest.tensors)]))
    for line in body.splitlines() if len(body) > MAX_LINE_VALUES else ():
        if problem := line_error(line):
            raise ValueError(f"{line[:80].decode()!r} ... {problem}; save in fewer and larger pieces")
    if len(body) > MAX_BYTES - 64:
        raise ValueError(f"the manifest would have {len(body)} bytes, expected at most {MAX_BYTES}: save fewer blocks")
    return body + last_line(body)


def _in_ascii(lines: bytes) -> bytes:
    """Lines of JSON with escapes for characters outside of ASCII, as `json` writes them."""
    if lines.isascii():
        return lines
    return _NOT_ASCII.sub(lambda found: _JSON.encode(found[0])[1:-1], lines.decode()).encode()


def last_line(body: bytes | memoryview) -> bytes:
    """The last line of a manifest with these bytes before it."""
    return f'{{"xxh3":"{checksum(body)}"}}\n'.encode()


def file_entry(file: File) -> dict[str, Any]:
    """The entry of a file in the manifest's header."""
    entry: dict[str, Any] = msgspec.to_builtins(file)
    return entry


def name_error(name: object) -> str | None:
    """The reason why `name` cannot name a tensor, or None. Names are paths of HDF5 groups, which "/" separates."""
    if not isinstance(name, str):
        return f"the name {name!r:.60} is no string"
    if len(name) > MAX_NAME:
        return f"the name {name[:60]!r}... has {len(name)} characters; expected at most {MAX_NAME}"
    return _text_error(name)


@lru_cache(1 << 14)  # a training saves the same names again and again
def _text_error(name: str) -> str | None:
    # Unprintable characters could also attack the terminal that shows the name.
    if name.isprintable() and _NO_NAMES.isdisjoint(name.split("/")):
        return None
    try:
        name.encode()
    except UnicodeEncodeError:
        return f"the name {name!a} is no valid Unicode"
    return f"the name {name!r} is no path of groups: it has an empty part, '.', '..' or a control character"


def shape_error(shape: Sequence[int], itemsize: int) -> str | None:
    """The reason why no tensor can have this shape, or None. NumPy has no larger arrays, also no empty ones."""
    if len(shape) > MAX_NDIM:
        return f"it has {len(shape)} dimensions; HDF5 knows at most {MAX_NDIM}"
    if math.prod([n or 1 for n in shape]) * itemsize > MAX_SIZE:
        return f"no array can have the shape {tuple(shape)}"
    return None


def axes_error(axes: object, ndim: int) -> str | None:
    """The reason why `axes` are not the mesh axes of `ndim` dimensions, or None."""
    fits = isinstance(axes, list | tuple) and len(axes) == ndim
    if fits and all(axis is None or (isinstance(axis, str) and axis.isprintable()) for axis in axes):  # type: ignore[attr-defined]
        return None
    return f"axes is {reprlib.repr(axes)}; expected {ndim} names of mesh axes, None where a dimension is whole"


def patterns_of(only: str | Sequence[str]) -> tuple[str, ...]:
    """The pattern or patterns of `only` as a tuple. TypeError or ValueError for other values and for an empty list."""
    patterns = (only,) if isinstance(only, str) else only
    if not isinstance(patterns, Collection) or not all(isinstance(p, str) for p in patterns):
        raise TypeError(f"only is {reprlib.repr(only)}; expected a pattern such as 'model/*', or a list of them")
    if not patterns:
        raise ValueError("only is empty; expected at least one pattern such as 'model/*', or None for all")
    return tuple(patterns)


def named(names: Iterable[str], only: str | Sequence[str] | None) -> list[str]:
    """The names that match the pattern `only`, such as "model/*", or one of several patterns; None: all names.

    A name always matches itself, also if it has special characters of patterns. Raises the errors of `patterns_of`.
    """
    if only is None:
        return list(names)
    patterns = set(patterns_of(only))
    match = _matcher(patterns)
    return [name for name in names if name in patterns or match(name)]


def unmatched_error(names: Sequence[str], only: str | Sequence[str] | None) -> str | None:
    """A message about a pattern in `only` that matches none of `names`, so that it may be misspelled; or None."""
    there = set(names)
    for pattern in () if only is None else patterns_of(only):
        if pattern not in there and not any(map(_matcher({pattern}), names)):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5)
            some = ", ".join(map(repr, near or names[:3])) or "none"
            hint = f"nearest: {some}" if near else f"there are {some}, {len(names)} in all"
            return f"no tensor's name matches {pattern!r}; {hint}"
    return None


def _matcher(patterns: Collection[str]) -> Callable[[str], object]:
    """A function that tells whether a name matches a pattern with special characters. Thousands of plain names cost no time here."""
    signs = [translate(pattern) for pattern in patterns if not {"*", "?", "["}.isdisjoint(pattern)]
    return re.compile("|".join(signs)).match if signs else lambda name: None


def nesting_error(names: Iterable[str]) -> str | None:
    """A message if one of `names` is both a tensor and a group of tensors, or if they are in very many groups, or None.

    A few letters of a name can make a hundred groups, each of which needs a kilobyte in HDF5.
    """
    names = names if isinstance(names, Collection) else list(names)
    most = _MAX_GROUPS * len(names) + _MORE_GROUPS
    if (groups := _groups_of(names, most)) is None:
        return f"the names are in more than {most} groups; expected fewer '/' in them"
    if groups.isdisjoint(names):
        return None
    # Sorted by their parts, the members of a group follow it directly.
    for name, following in pairwise(sorted(names, key=lambda name: name.replace("/", "\0"))):
        if following.startswith(name) and following.startswith(name + "/"):
            return f"the name {name!r} is a tensor and also the group of {following!r}"
    return None


def _groups_of(names: Collection[str], most: int) -> set[str] | None:
    """The groups that the names are in. None if there are more than `most`."""
    groups: set[str] = set()
    above = {name.rpartition("/")[0] for name in names}
    while above and len(groups) <= most:
        groups |= above
        above = {group.rpartition("/")[0] for group in above} - groups
    return groups if len(groups) <= most else None
