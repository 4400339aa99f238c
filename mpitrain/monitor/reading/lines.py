"""Lines of JSON of a file, decoded in blocks. Lines that are torn, or are no object with a whole number `step`, are left out."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

Line = dict[str, Any]
BLOCK_BYTES = 8 << 20
"""A block bounds the memory: the objects of its lines take about ten times its bytes, the arrays made of them much less."""


class Block(NamedTuple):
    """Lines of a file, in its order."""

    lines: list[Line]
    num_damaged: int
    """Lines that were left out. The incomplete last line of a file, which is being written or was when its writer died, is none."""


_DECODER = msgspec.json.Decoder()


def read_blocks(path: Path) -> Iterator[Block]:
    """The lines of a file. A missing file has none. Raises OSError."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        rest = b""
        while block := file.read(BLOCK_BYTES):
            whole, newline, torn = block.rpartition(b"\n")
            if not newline:
                rest += block
                continue
            yield decode(rest + whole)
            rest = torn
        if rest:
            yield Block(decode(rest).lines, 0)


def decode(text: bytes) -> Block:
    """The objects of lines."""
    try:
        lines = _DECODER.decode_lines(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        lines = [_decode_one(line) for line in text.split(b"\n") if line]
    found = [line for line in lines if type(line) is dict and type(line.get("step")) is int]
    return Block(found, len(lines) - len(found))


def _decode_one(line: bytes) -> Any:
    try:
        return _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
