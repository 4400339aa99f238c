"""Sparse files in tar files: of a file with holes, only the bytes between them are there, with a map of their places.

    old GNU        kind S: four places in the header, and 21 in each further block that follows it
    GNU 0.0, 0.1   a pax header names the places, as records GNU.sparse.offset and GNU.sparse.numbytes, or as one GNU.sparse.map
    GNU 1.0        the map is the begin of the member: decimal numbers, each on a line

Source: GNU tar manual, "Storing Sparse Files". Maps that do not fit their member are refused: the bytes would go to other places.
"""

import mmap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mpitrain.data.documents.reading import DamagedShardError
from mpitrain.data.documents.tar.numbers import BLOCK, number, rounded_up

MOST_BYTES = 128 << 20
"""A sparse file that is larger with its holes is not read: a few bytes could ask for all memory."""

MOST_MAP_BYTES = 1 << 20

_ENTRY_BYTES = 24  # of an old map: the digits of a place, and of a number of bytes
_IN_HEADER, _IN_BLOCK = slice(386, 482), slice(0, 504)
_MORE_IN_HEADER, _MORE_IN_BLOCK = 482, 504
_SIZE_IN_HEADER = slice(483, 495)
_OLD_GNU = b"ustar  \0"

Pairs = Sequence[tuple[int, int]]
"""Places in the file, and the number of bytes at each."""


class Extents(NamedTuple):
    """A sparse file of `size` bytes. `pieces`: (place in the file, place in the tar file, number of bytes)."""

    pieces: tuple[tuple[int, int, int], ...]
    size: int

    def read(self, data: mmap.mmap) -> bytes:
        """The file with its holes, which are zeros. `data`: the tar file."""
        whole = bytearray(self.size)
        for place, begin, num_bytes in self.pieces:
            whole[place : place + num_bytes] = data[begin : begin + num_bytes]
        return bytes(whole)


def of_old_gnu(data: mmap.mmap, at: int, end: int, num_bytes: int, where: str) -> tuple[Extents, int]:
    """The sparse file with its header at byte `at`, and the byte after its map. `num_bytes`: of its member.

    DamagedShardError if the map is damaged, or of another program.
    """
    header = data[at : at + BLOCK]
    if header[257:265] != _OLD_GNU:
        raise DamagedShardError(f"{where} is a sparse file in a format that is not GNU tar's")
    entries, has_more, begin = header[_IN_HEADER], header[_MORE_IN_HEADER], at + BLOCK
    while has_more:
        if begin + BLOCK > end or len(entries) > MOST_MAP_BYTES:
            raise DamagedShardError(f"{where} is a sparse file with a map that does not end")
        block = data[begin : begin + BLOCK]
        entries, has_more, begin = entries + block[_IN_BLOCK], block[_MORE_IN_BLOCK], begin + BLOCK
    pairs = []
    for first in range(0, len(entries), _ENTRY_BYTES):
        entry = entries[first : first + _ENTRY_BYTES]
        if not entry.strip(b"\0"):
            break
        pairs.append((number(entry[:12]), number(entry[12:])))
    return _placed(pairs, begin, num_bytes, number(header[_SIZE_IN_HEADER]), where), begin


def of_pax(records: Sequence[tuple[bytes, bytes]], data: mmap.mmap, begin: int, num_bytes: int, where: str) -> Extents:
    """The sparse file that the records `GNU.sparse.*` of a pax header describe. Its member has `num_bytes` bytes from `begin` on.

    DamagedShardError if the map is damaged, or of another version.
    """
    last = dict(records)
    version = last.get(b"GNU.sparse.major", b"0"), last.get(b"GNU.sparse.minor", b"")
    size = _decimal(last.get(b"GNU.sparse.realsize", last.get(b"GNU.sparse.size", b"")))
    if version == (b"1", b"0"):
        pairs, map_bytes = _map_of_member(data[begin : begin + min(num_bytes, MOST_MAP_BYTES)])
        return _placed(pairs, begin + map_bytes, num_bytes - map_bytes, size, where)
    if version[0] != b"0":
        raise DamagedShardError(
            f"{where} is a sparse file of the version {version[0]!r}.{version[1]!r}, which is not known"
        )
    if b"GNU.sparse.map" in last:
        numbers = last[b"GNU.sparse.map"].split(b",") if last[b"GNU.sparse.map"] else []
        places, lengths = numbers[::2], numbers[1::2]
    else:
        places = [value for key, value in records if key == b"GNU.sparse.offset"]
        lengths = [value for key, value in records if key == b"GNU.sparse.numbytes"]
    if len(places) != len(lengths):
        raise DamagedShardError(f"{where} is a sparse file with a damaged map")
    pairs = [(_decimal(place), _decimal(length)) for place, length in zip(places, lengths, strict=True)]
    return _placed(pairs, begin, num_bytes, size, where)


def _map_of_member(head: bytes) -> tuple[Pairs, int]:
    """The map at the begin of a member, and the bytes that it takes. Places of -1 if it is damaged, which nobody accepts."""
    first, _, rest = head.partition(b"\n")
    count = _decimal(first)
    lines = rest.split(b"\n", 2 * count) if 0 <= 2 * count < len(rest) else []
    if len(lines) != 2 * count + 1:
        return [(-1, -1)], 0
    map_bytes = len(head) - len(lines.pop())
    numbers = map(_decimal, lines)
    return list(zip(numbers, numbers, strict=True)), rounded_up(map_bytes)


def _decimal(digits: bytes) -> int:
    """A number in decimal digits; -1 if it is none."""
    return int(digits) if digits.isdigit() and len(digits) < 20 else -1


def _placed(pairs: Pairs, begin: int, num_bytes: int, size: int, where: str) -> Extents:
    """The pieces, which follow one another from the byte `begin` on. DamagedShardError unless they fit the member and the file."""
    pieces = tuple(_pieces(pairs, begin, size))
    if sum(length for _, length in pairs) != num_bytes or len(pieces) < len(pairs):
        raise DamagedShardError(f"{where} is a sparse file with a damaged map")
    return Extents(pieces, size)


def _pieces(pairs: Pairs, begin: int, size: int) -> Iterator[tuple[int, int, int]]:
    """The pieces up to the first one that is not after those before, or not within the file."""
    after = 0
    for place, length in pairs:
        if place < after or length < 0 or place + length > size:
            return
        yield place, begin, length
        after, begin = place + length, begin + length
