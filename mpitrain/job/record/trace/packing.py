"""The file of a trace: each rank packs its part, and rank 0 joins the parts to one gzip member.

A reader of gzip may stop after the first member, so members are not simply joined. Each part is a deflate stream without an end, which
stops at a whole byte; joined in order such parts are one stream (as pigz does). The checksum of the whole follows from those of the
parts.
"""

import json
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.files import blocks_of_lines, json_of

_HEAD = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"  # gzip, deflate, no time, no name, any system
_END = b"\x03\0"  # an empty last block


class Packed(NamedTuple):
    """A packed part."""

    data: bytes
    checksum: int
    length: int
    """Bytes before the packing."""


def pack(text: str) -> Packed:
    """Pack a part of a file."""
    raw = text.encode()
    packer = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS)
    return Packed(packer.compress(raw) + packer.flush(zlib.Z_FULL_FLUSH), zlib.crc32(raw), len(raw))


def joined(parts: Iterable[Packed]) -> Iterator[bytes]:
    """The bytes of a gzip file with the parts one after the other."""
    checksum, length = 0, 0
    yield _HEAD
    for part in parts:
        # The checksum is linear: the zeros move the first part's by the length of the second.
        zeros = bytes(part.length)
        checksum = zlib.crc32(zeros, checksum) ^ zlib.crc32(zeros) ^ part.checksum
        length += part.length
        yield part.data
    yield _END + struct.pack("<II", checksum, length & 0xFFFFFFFF)


def begin_of_file(about: dict[str, Any]) -> str:
    """What comes before the events of the first rank. `about`: facts about the trace."""
    known = json.dumps(about, separators=(",", ":"))
    return f'{{"displayTimeUnit":"ms","otherData":{known},"traceEvents":[\n'


BETWEEN, END_OF_FILE = ",\n", "\n]}\n"


def read_trace(file: Path) -> dict[str, Any]:
    """The object in a file. ValueError if the file is no trace; OSError if it cannot be read, is no regular file, or is a bomb."""
    lines = lines_of(file)
    try:
        begin = json_of(next(lines) + b"]}")
        events = [json_of(line) for line in lines]
    except (ValueError, StopIteration) as error:
        raise no_trace(file, error) from None
    if not isinstance(begin, dict) or "traceEvents" not in begin:
        raise no_trace(file, "it begins with something else")
    return begin | {"traceEvents": events}


def lines_of(file: Path) -> Iterator[bytes]:
    """What a trace begins with, and then each of its events as JSON. OSError: see `read_trace`."""
    try:
        for block, _ in blocks_of_lines(file):
            for line in block.split(b"\n"):
                if line not in (b"", b"]}"):
                    yield line.removesuffix(b",")
    except OSError as error:
        raise OSError(f"{file} cannot be read: {error.strerror or error}") from None


def no_trace(file: Path, why: object) -> ValueError:
    """The error of a file that is none of ours."""
    return ValueError(f"{file}: expected a trace of mpitrain (.json.gz), got something else ({why})")
