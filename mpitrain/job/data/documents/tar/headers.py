"""The headers of a tar file: where they are, and what they say.

A loop goes from header to header, and reads little more than the sizes: they alone say where the next header is, because the bytes of a
member may look like one. NumPy then takes some hundred headers at a time for checksums, kinds and names.

Formats: ustar with its prefix, pax, GNU's long names, and sizes in octal digits or base 256. A header with a wrong checksum ends the
shard: where the next one is cannot be known. Source of the formats: POSIX.1-2017, pax, "ustar Interchange Format"; GNU tar manual,
"Basic Tar Format".
"""

from collections.abc import Iterator
from struct import Struct
from typing import NamedTuple

import numpy as np

from mpitrain.job.data.documents.reading import DamagedShardError, MappedFile
from mpitrain.job.data.documents.tar.numbers import BLOCK, is_header, number
from mpitrain.job.data.documents.tar.sparse import Extents, of_old_gnu, of_pax

_MOST_HEADER_BYTES = 1 << 20  # of a long name or pax header
_MOST_NAME_BYTES = 4096  # as Linux
_MOST_PADDING = 1 << 20  # of an archive: tar's largest usual record
_PIECE = 512  # headers at a time: 256 KiB, which stay in a core's cache
_SIZE_AND_KIND = Struct("124x11sB20xB")  # of a header: the digits of the size, what ends them, and the kind

HARD, SYMBOLIC = ord("1"), ord("2")
FILES, LINKS, SPARSE, FOLDER = b"0\x007", b"12", b"S", b"5"  # kinds; 7 is a contiguous file
DEVICES = b"346"  # and pipes
_FILE, _GLOBAL = ord("0"), ord("g")
_WITHOUT_DATA = b"123456"  # what their size says is something else
BEFORE_ENTRIES = b"LKxXg"
"""They say more of the next entry, or of all: a long name or link, and pax headers; Solaris writes X for x."""
_OTHERS = b"VD"  # the label of a volume, and the names in a folder of an incremental dump


class Members(NamedTuple):
    """Where the headers are, and the sizes of their members, int64. By the place of a header, what it does not say itself:

    `names`: long ones; `targets`: of links, long ones; `maps`: of sparse files; `bodies`: hard links that have the file's bytes, too.
    `flaw`: what the end of the file shows to be missing, or "". `is_ended`: whether two empty blocks, which end a tar file, were found.
    """

    headers: np.ndarray
    sizes: np.ndarray
    names: dict[int, bytes]
    targets: dict[int, bytes]
    maps: dict[int, Extents]
    bodies: set[int]
    flaw: str
    is_ended: bool


class _More(NamedTuple):
    """What the headers before an entry say of it. `sparse`: the records `GNU.sparse.*` of a pax header, in their order.

    `has_pax`: whether one of them is a pax header.
    """

    long_name: bytes = b""
    long_target: bytes = b""
    path: bytes = b""
    linkpath: bytes = b""
    size: int | None = None
    sparse: tuple[tuple[bytes, bytes], ...] = ()
    has_pax: bool = False

    @property
    def name(self) -> bytes:
        """The name of the entry, if its own header has not all of it. That of a sparse file in its pax header is a made-up one."""
        return dict(self.sparse).get(b"GNU.sparse.name", b"") or self.path or self.long_name


_NOTHING = _More()


def walked(file: MappedFile, at: int, end: int) -> Members:
    """Go from header to header, from the byte `at` to the byte `end - 1`.

    DamagedShardError for a header without a size, for damaged names and maps, and for another archive behind the end of this one.
    """
    data, shard, fields_of = file.bytes, file.name, _SIZE_AND_KIND.unpack_from
    nothing, plain, block = _NOTHING, _FILE, BLOCK  # names of this function are found faster
    headers: list[int] = []
    sizes: list[int] = []
    found = Members(np.empty(0), np.empty(0), {}, {}, {}, set(), "", False)
    more, flaw, begin, num_bytes = nothing, "", at, 0
    while at + block <= end:
        digits, stop, kind = fields_of(data, at)
        try:
            num_bytes = int(digits, 8)
        except ValueError:
            num_bytes = -1
        if num_bytes < 0 or stop not in b"\0 ":
            header = data[at : at + BLOCK]
            if not header.strip(b"\0"):  # two empty blocks end the archive; what follows one is no member either
                _check_end(file, at, end)
                found = found._replace(is_ended=True)
                break
            num_bytes = number(header[124:136])
            if num_bytes < 0:
                raise DamagedShardError(f"{shard}: the tar header at byte {at} is damaged: it has no size")
        begin = at + block
        if kind != plain or more is not nothing:
            if kind in BEFORE_ENTRIES:
                more = _with(more, kind, file, at, num_bytes, end)
            else:
                begin, num_bytes = _odd_member(found, more, kind, file, at, num_bytes, end)
                more = nothing
        headers.append(at)
        sizes.append(num_bytes)
        at = begin + (num_bytes + block - 1) // block * block
    else:
        if at < end:
            flaw = f"its header at byte {at} has {BLOCK}"
        elif at > end:
            sizes[-1] = 0  # it may be too large for int64
            flaw = (
                f"its member at byte {headers[-1]} ends at byte {begin + num_bytes}"
                if begin + num_bytes > end
                else f"its last member ends at byte {at}"
            )
    if more is not nothing and not flaw:
        flaw = f"no entry follows the header at byte {headers[-1]}, which is about one"
    return found._replace(headers=np.fromiter(headers, np.int64), sizes=np.fromiter(sizes, np.int64), flaw=flaw)


def _odd_member(
    found: Members, more: _More, kind: int, file: MappedFile, at: int, num_bytes: int, end: int
) -> tuple[int, int]:
    """Where the bytes of a member begin, and their number: of one that is no plain file, or of which other headers say more.

    Adds to `found`.
    """
    begin, where = at + BLOCK, f"{file.name}: the entry at byte {at}"
    if name := more.name:
        if len(name) > _MOST_NAME_BYTES:
            raise DamagedShardError(f"{where} has a name of {len(name)} bytes; expected {_MOST_NAME_BYTES} at most")
        found.names[at] = name
    if target := more.linkpath or more.long_target:
        found.targets[at] = target
    if kind == HARD and num_bytes:
        # pax may write the bytes of the file again, and old programs the size of the file without its bytes.
        if begin < end and not is_header(next_block := file.bytes[begin : begin + BLOCK]) and next_block.strip(b"\0"):
            found.bodies.add(at)
            return begin, more.size or num_bytes
        return begin, 0
    if kind in _WITHOUT_DATA:
        return begin, 0
    if more.size is not None:
        num_bytes = more.size
    if kind in SPARSE:
        found.maps[at], begin = of_old_gnu(file.bytes, at, end, num_bytes, where)
    elif more.sparse and begin + num_bytes <= end:
        found.maps[at] = of_pax(more.sparse, file.bytes, begin, num_bytes, where)
    return begin, num_bytes


def _with(more: _More, kind: int, file: MappedFile, at: int, num_bytes: int, end: int) -> _More:
    """What is known of the next entry after one more header about it, with `num_bytes` bytes."""
    begin = at + BLOCK
    if begin + num_bytes > end:
        return more  # the file is cut off
    if num_bytes > _MOST_HEADER_BYTES:
        raise DamagedShardError(f"{file.name}: the tar header at byte {at} has {num_bytes} bytes of names")
    content, where, sparse = file.bytes[begin : begin + num_bytes], f"{file.name}: the pax header at byte {at}", []
    if kind in b"LK":
        if not (name := content.partition(b"\0")[0]):
            raise DamagedShardError(f"{file.name}: the long name at byte {at} is empty")
        return more._replace(long_name=name) if kind == ord("L") else more._replace(long_target=name)
    said = _NOTHING
    for key, value in _records(content, where):
        if key == b"path":
            said = said._replace(path=value.partition(b"\0")[0])
        elif key == b"linkpath":
            said = said._replace(linkpath=value.partition(b"\0")[0])
        elif key == b"size":
            if not value.isdigit() or len(value) > 19:
                raise DamagedShardError(f"{where} is damaged: its size is {value[:20]!r}")
            said = said._replace(size=int(value))
        elif key.startswith(b"GNU.sparse."):
            sparse.append((key, value))
        elif key == b"SCHILY.realsize":
            raise DamagedShardError(f"{where} is of a sparse file in a format that is not GNU tar's")
    said = said._replace(sparse=tuple(sparse))
    if kind != _GLOBAL:
        if more.has_pax:
            raise DamagedShardError(f"{where} follows another one, and no entry is between them")
        return said._replace(long_name=more.long_name, long_target=more.long_target, has_pax=True)
    if said != _NOTHING:
        raise DamagedShardError(
            f"{where} gives all files that follow one name or size; expected such a header for each file"
        )
    return more


def _records(content: bytes, where: str) -> Iterator[tuple[bytes, bytes]]:
    """The records `LENGTH KEY=VALUE\\n` of a pax header."""
    at = 0
    while at < len(content):
        digits, space, _ = content[at : at + 20].partition(b" ")
        length = int(digits) if space and digits.isdigit() else 0
        key, equals, value = content[at + len(digits) + 1 : at + length].partition(b"=")
        if length <= len(digits) + 1 or at + length > len(content) or not equals or value[-1:] != b"\n":
            raise DamagedShardError(f"{where} is damaged")
        yield key, value[:-1]
        at += length


def _check_end(file: MappedFile, at: int, end: int) -> None:
    """DamagedShardError if an archive follows the one that ends at byte `at`: its files are not those of this one."""
    rest = file.bytes[at : min(at + _MOST_PADDING, end)]
    if not rest.strip(b"\0"):
        return
    for begin in range(0, len(rest) - BLOCK + 1, BLOCK):
        if is_header(rest[begin : begin + BLOCK]):
            raise DamagedShardError(
                f"{file.name}: the archive ends at byte {at}, and another one follows at byte {at + begin}; expected one, as "
                "`tar --concatenate` makes of two"
            )


def table_of(kinds: bytes) -> np.ndarray:
    """Whether each kind, 0 to 255, is one of these: bool."""
    table = np.zeros(256, np.bool_)
    table[list(kinds)] = True
    return table


_IS_KNOWN = table_of(FILES + LINKS + SPARSE + FOLDER + DEVICES + BEFORE_ENTRIES + _OTHERS)


def checked(file: MappedFile, headers: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Some headers at a time: where they begin, and their bytes, uint8 of shape (headers, 512).

    DamagedShardError if a header has not the checksum that it names (see `is_header`), or is of a kind that is not known.
    """
    whole = np.frombuffer(file.bytes, np.uint8, file.size // BLOCK * BLOCK).reshape(-1, BLOCK)
    for first in range(0, len(headers), _PIECE):
        places = headers[first : first + _PIECE]
        blocks = whole.take(places // BLOCK, axis=0)
        sums = blocks.sum(axis=1, dtype=np.uint32) - blocks[:, 148:156].sum(axis=1, dtype=np.uint32) + 8 * 32
        digits = blocks[:, 148:154].astype(np.int64) - ord("0")  # the usual form; `is_header` knows the others
        is_usual = ((digits >= 0) & (digits < 8)).all(axis=1) & (digits @ 8 ** np.arange(5, -1, -1) == sums)
        for index in np.flatnonzero(~is_usual).tolist():
            if not is_header(blocks[index].tobytes()):
                raise DamagedShardError(
                    f"{file.name}: the tar header at byte {places[index]} is damaged: its checksum is wrong"
                )
        if not (are_known := _IS_KNOWN[blocks[:, 156]]).all():
            index = int(np.argmin(are_known))
            raise DamagedShardError(
                f"{file.name}: the entry at byte {places[index]} is of the kind {chr(blocks[index, 156])!r}, which is not known; "
                "expected files, folders and links"
            )
        yield places, blocks
