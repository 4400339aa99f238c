"""Lists of shards with checksums, as `sha256sum *.tar > shards.sha256` and `md5sum` write them: lines of a hash and a name."""

import hashlib
import os
import re
from pathlib import Path

from mpitrain.job.data.documents.kinds import ending_of

_BYTES = {"sha256": 32, "md5": 16}
_LINE = re.compile(r"([0-9a-fA-F]+) [ *](.+)")  # "*": read as a binary file


def is_checksum_list(name: str) -> bool:
    """Whether a name of `data.path` is that of such a list: the ending decides."""
    return ending_of(name).rpartition(".")[2] in _BYTES


def read_checksums(list_name: str, data: bytes) -> dict[str, bytes]:
    """The checksum of each name in a list. The names are relative to the list's folder, and lie in it.

    ValueError for a line that is none, a name that leads out of the folder, or one that comes twice.
    """
    kind = ending_of(list_name).rpartition(".")[2]
    found: dict[str, bytes] = {}
    for number, line in enumerate(os.fsdecode(data).split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None or len(match[1]) != 2 * _BYTES[kind]:
            raise ValueError(
                f"data: {list_name}, line {number}: expected a line of {kind}sum, {2 * _BYTES[kind]} hexadecimal digits, two blanks, "
                f"and a name; got {line[:100]!r}"
            )
        parts = match[2].split("/")
        while len(parts) > 1 and parts[0] == ".":
            del parts[0]
        name = "/".join(parts)
        if {"", ".", ".."} & set(parts) or "\0" in name or "://" in name:
            raise ValueError(
                f"data: {list_name}, line {number}: expected a name in the list's folder, got {name[:100]!r}"
            )
        if name in found:
            raise ValueError(f"data: {list_name}, line {number}: {name} comes twice")
        found[name] = bytes.fromhex(match[1])
    if not found:
        raise ValueError(f"data: {list_name} names no file")
    return found


def difference(path: Path, expected: bytes) -> str:
    """What is wrong with a file of which this is the checksum; "" if nothing is."""
    kind = next(kind for kind, num_bytes in _BYTES.items() if num_bytes == len(expected))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False)).digest()
    return "" if digest == expected else f"expected {kind} {expected.hex()} as listed, got {digest.hex()}"
