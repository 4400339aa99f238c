"""Sparse files in tar files: of a file with holes, only the bytes between them are there, with a map of their places.

    old GNU        kind S: four places in the header, and 21 in each further block that follows it
    GNU 0.0, 0.1   a pax header names the places, as records GNU.sparse.offset and GNU.sparse.numbytes, or as one GNU.sparse.map
    GNU 1.0        the map is the begin of the member: decimal numbers, each on a line

Source: GNU tar manual, "Storing Sparse Files". Maps that do not fit their member are refused: the bytes would go to other places.
A map is kept in 8 bytes for each piece that is not empty, and of such pieces each has at least a byte in the tar file.
"""

import mmap
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mpitrain.job.data.documents.reading import DamagedShardError
from mpitrain.job.data.documents.tar.numbers import BLOCK, number, rounded_up

MOST_BYTES = 128 << 20
"""A sparse file that is larger with its holes is not read: a few bytes could ask for all memory."""

MOST_MAP_BYTES = 1 << 20

_ENTRY_BYTES = 24  # of an old map: the digits of a place, and of a number of bytes
_IN_HEADER, _IN_BLOCK = slice(386, 482), slice(0, 504)
_MORE_IN_HEADER, _MORE_IN_BLOCK = 482, 504
_SIZE_IN_HEADER = slice(483, 495)
_OLD_GNU = b"ustar  \0"


class Extents(NamedTuple):
    """A sparse file of `size` bytes. Its pieces follow one another in the tar file, from the byte `begin` on.

    `places`: of the pieces, in the file, and `lengths`: their bytes, 32 bits each. None are kept of a file of more than MOST_BYTES.
    """

    size: int
    begin: int
    places: "array[int]"
    lengths: "array[int]"

    def read(self, data: mmap.mmap) -> bytes:
        """The file with its holes, which are zeros. `data`: the tar file."""
        whole, begin = bytearray(self.size), self.begin
        for place, num_bytes in zip(self.places, self.lengths, strict=True):
            whole[place : place + num_bytes] = data[begin : begin + num_bytes]
            begin += num_bytes
        return bytes(whole)


def of_old_gnu(data: mmap.mmap, at: int, end: int, num_bytes: int, where: str) -> tuple[Extents, int]:
    """The sparse file with its header at byte `at`, and the byte after its map. `num_bytes`: of its member.

    DamagedShardError if the map is damaged, or of another program.
    """
    header = data[at : at + BLOCK]
    if header[257:265] != _OLD_GNU:
        raise DamagedShardError(f"{where} is a sparse file in a format that is not GNU tar's")
    entries, has_more, begin = bytearray(header[_IN_HEADER]), header[_MORE_IN_HEADER], at + BLOCK
    while has_more:
        if begin + BLOCK > end or len(entries) > MOST_MAP_BYTES:
            raise DamagedShardError(f"{where} is a sparse file with a map that does not end")
        block = data[begin : begin + BLOCK]
        entries += block[_IN_BLOCK]
        has_more, begin = block[_MORE_IN_BLOCK], begin + BLOCK
    fields = [bytes(entries[first : first + _ENTRY_BYTES]) for first in range(0, len(entries), _ENTRY_BYTES)]
    num = next((index for index, field in enumerate(fields) if not field.strip(b"\0")), len(fields))
    places, lengths = ([number(field[half]) for field in fields[:num]] for half in (slice(12), slice(12, None)))
    return _placed(places, lengths, begin, num_bytes, number(header[_SIZE_IN_HEADER]), where), begin


def of_pax(records: Sequence[tuple[bytes, bytes]], data: mmap.mmap, begin: int, num_bytes: int, where: str) -> Extents:
    """The sparse file that the records `GNU.sparse.*` of a pax header describe. Its member has `num_bytes` bytes from `begin` on.

    DamagedShardError if the map is damaged, or of another version.
    """
    last = dict(records)
    version = last.get(b"GNU.sparse.major", b"0"), last.get(b"GNU.sparse.minor", b"")
    size = _decimal(last.get(b"GNU.sparse.realsize", last.get(b"GNU.sparse.size", b"")))
    if version == (b"1", b"0"):
        numbers, map_bytes = _map_of_member(data[begin : begin + min(num_bytes, MOST_MAP_BYTES)])
        return _placed(numbers[::2], numbers[1::2], begin + map_bytes, num_bytes - map_bytes, size, where)
    if version[0] != b"0":
        raise DamagedShardError(
            f"{where} is a sparse file of the version {version[0]!r}.{version[1]!r}, which is not known"
        )
    if b"GNU.sparse.map" in last:
        told = last[b"GNU.sparse.map"].split(b",") if last[b"GNU.sparse.map"] else []
        places, lengths = told[::2], told[1::2]
    else:
        places = [value for key, value in records if key == b"GNU.sparse.offset"]
        lengths = [value for key, value in records if key == b"GNU.sparse.numbytes"]
    if len(places) != len(lengths):
        raise DamagedShardError(f"{where} is a sparse file with a damaged map")
    return _placed(map(_decimal, places), map(_decimal, lengths), begin, num_bytes, size, where)


def _map_of_member(head: bytes) -> tuple[Sequence[int], int]:
    """The numbers of the map at the begin of a member, and the bytes that it takes. -1 if it is damaged, which nobody accepts."""
    first, _, rest = head.partition(b"\n")
    count = _decimal(first)
    lines = rest.split(b"\n", 2 * count) if 0 <= 2 * count < len(rest) else []
    if len(lines) != 2 * count + 1:
        return [-1, -1], 0
    map_bytes = len(head) - len(lines.pop())
    return list(map(_decimal, lines)), rounded_up(map_bytes)


def _decimal(digits: bytes) -> int:
    """A number in decimal digits; -1 if it is none."""
    return int(digits) if digits.isdigit() and len(digits) < 20 else -1


def _placed(
    places: Iterable[int], lengths: Iterable[int], begin: int, num_bytes: int, size: int, where: str
) -> Extents:
    """The file with its pieces. DamagedShardError unless they fit it, and the member, of `num_bytes` bytes from the byte `begin` on."""
    kept_places, kept_lengths, after, total = array("i"), array("i"), 0, 0
    for place, length in zip(places, lengths, strict=True):
        if place < after or length < 0 or place + length > size:
            raise DamagedShardError(f"{where} is a sparse file with a damaged map")
        after, total = place + length, total + length
        if length and size <= MOST_BYTES:
            kept_places.append(place)
            kept_lengths.append(length)
    if total != num_bytes:
        raise DamagedShardError(f"{where} is a sparse file with a damaged map")
    return Extents(size, begin, kept_places, kept_lengths)
