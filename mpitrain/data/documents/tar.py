"""Samples in tar files, as WebDataset names them: neighbouring files that differ in what follows the first dot are parts of one sample.

    0001.txt 0001.json 0002.txt ...       the samples 0001, with the parts txt and json, and 0002

The places of all files are found once, from header to header. Formats: ustar with its prefix, pax, GNU's long names, and sizes in octal
digits or base 256. A header with a wrong checksum ends the shard: where the next one is cannot be known. Source of the format:
POSIX.1-2017, pax, "ustar Interchange Format"; GNU tar manual, "Basic Tar Format".
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mpitrain.data.documents.reading import DamagedSampleError, DamagedShardError, MappedFile

_BLOCK = 512
_MOST_HEADER_BYTES = 1 << 20  # of a long name or pax header
_CHECKED = 4096  # headers at a time: 2 MiB
_FILE_TYPES = b"0\x007"  # regular files; 7 is a contiguous one
_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL = b"LKxg"


class _Pax(NamedTuple):
    """What a pax header says of the next file."""

    path: bytes = b""
    size: int | None = None


_NO_PAX = _Pax()


class TarReader:
    """An open tar file. `name`: see MappedFile. `part`: of a sample that is its text, such as "json"; None: the only one or "txt".

    DamagedShardError if a header is damaged, or the file ends within a member.
    """

    def __init__(self, path: Path, name: str, part: str | None = None) -> None:
        self._file, self._part = MappedFile(path, name), part
        try:
            self._index()
        except BaseException:
            self._file.close()
            raise

    def cut(self, begin: int, end: int) -> "TarCut":
        """See Reader."""
        first, last = np.searchsorted(self._begins, (begin, end))
        return TarCut(self, int(first), int(last))

    def close(self) -> None:
        """See Reader."""
        self._file.close()

    def parts(self, number: int) -> dict[str, bytes]:
        """The parts of a sample by what follows the first dot of their names. DamagedSampleError for a name that is no key."""
        self._check_key(number)
        begin, end = self._firsts[number], self._firsts[number + 1]
        return {_part_of(self._names[at]).decode(errors="replace"): self._bytes_of(at) for at in range(begin, end)}

    def text(self, number: int) -> bytes:
        """The part of a sample that is its text."""
        self._check_key(number)
        begin, end = self._firsts[number], self._firsts[number + 1]
        if self._part is None and end - begin == 1:
            return self._bytes_of(begin)
        wanted = (self._part or "txt").encode()
        for at in range(begin, end):
            if _part_of(self._names[at]) == wanted:
                return self._bytes_of(at)
        raise DamagedSampleError(
            f"{self.where(number)}: expected a part {wanted.decode()!r}, got {sorted(self.parts(number))}"
        )

    def key(self, number: int) -> bytes:
        """The name of a sample's files up to the first dot."""
        return _key_of(self._names[self._firsts[number]])

    def where(self, number: int) -> str:
        """A sample, for messages."""
        return f"{self._file.name}, sample {self.key(number).decode(errors='replace')!r}"

    def _check_key(self, number: int) -> None:
        """DamagedSampleError for a name that would leave a folder if somebody unpacked the file: it is no key of an honest sample."""
        name = self._names[self._firsts[number]]
        if name[:1] == b"/" or (b".." in name and b".." in self.key(number).split(b"/")):
            raise DamagedSampleError(f"{self.where(number)}: expected a relative name without '..'")

    def _bytes_of(self, at: int) -> bytes:
        begin = self._places[at]
        return self._file.bytes[begin : begin + self._sizes[at]]

    def _index(self) -> None:
        """Find all files and samples."""
        data, size, shard = self._file.bytes, self._file.size, self._file.name
        headers: list[int] = []
        places: list[int] = []
        sizes: list[int] = []
        names: list[bytes] = []
        firsts: list[int] = []
        begins: list[int] = []
        at, begin, long_name, pax = 0, 0, b"", _NO_PAX
        last_key = None
        while at + _BLOCK <= size:
            header = data[at : at + _BLOCK]
            if not header[0] and not header.strip(b"\0"):
                break  # two empty blocks end the archive; what follows one is no member either
            headers.append(at)
            kind = header[156]
            try:
                num_bytes: int | None = int(header[124:136].rstrip(b"\0 "), 8)  # nearly always
            except ValueError:
                num_bytes = _number(header[124:136])
            if num_bytes is None or num_bytes < 0:
                raise DamagedShardError(f"{shard}: the tar header at byte {at} is damaged: it has no size")
            if pax.size is not None and kind in _FILE_TYPES:
                num_bytes = pax.size
            place = at + _BLOCK
            at = place + (num_bytes + _BLOCK - 1) // _BLOCK * _BLOCK
            if place + num_bytes > size:
                _check_sums(np.frombuffer(data, np.uint8), headers, shard)  # first: the size may be a damaged one
                raise _cut_off(shard, size, f"its member at byte {headers[-1]} ends at byte {place + num_bytes}")
            if kind in _FILE_TYPES:
                name = pax.path or long_name or _short_name(header)
                key = _key_of(name)
                if key != last_key:
                    firsts.append(len(names))
                    begins.append(begin)
                    last_key = key
                names.append(name)
                places.append(place)
                sizes.append(num_bytes)
            elif kind in (_LONG_NAME, _PAX):
                if num_bytes > _MOST_HEADER_BYTES:
                    raise DamagedShardError(
                        f"{shard}: the tar header at byte {headers[-1]} has {num_bytes} bytes of names"
                    )
                if kind == _LONG_NAME:
                    long_name = data[place : place + num_bytes].rstrip(b"\0")
                else:
                    pax = _pax(data[place : place + num_bytes], f"{shard}: the pax header at byte {headers[-1]}")
                continue
            elif kind in (_LONG_LINK, _PAX_GLOBAL):
                continue
            begin, long_name, pax = at, b"", _NO_PAX  # headers before the next file belong to it
        else:
            if at != size:
                raise _cut_off(
                    shard,
                    size,
                    f"its header at byte {at} has {_BLOCK}" if at < size else f"its last member ends at byte {at}",
                )
        _check_sums(np.frombuffer(data, np.uint8), headers, shard)
        self._places, self._sizes, self._names = places, sizes, names
        self._firsts = [*firsts, len(names)]
        self._begins = np.array(begins, np.int64)


class TarCut:
    """Neighbouring samples of a tar file. See Cut."""

    def __init__(self, reader: TarReader, first: int, last: int) -> None:
        self._reader, self._first, self._last = reader, first, last

    def __len__(self) -> int:
        return self._last - self._first

    def key(self, index: int) -> bytes:
        return self._reader.key(self._first + index)

    def text(self, index: int) -> bytes:
        return self._reader.text(self._first + index)

    def parts(self, index: int) -> dict[str, bytes]:
        """All parts of a sample."""
        return self._reader.parts(self._first + index)


def _cut_off(shard: str, size: int, but: str) -> DamagedShardError:
    return DamagedShardError(f"{shard}: the file is cut off: it has {size} bytes, and {but}")


def _key_of(name: bytes) -> bytes:
    dot = name.find(b".", name.rfind(b"/") + 1)
    return name if dot < 0 else name[:dot]


def _part_of(name: bytes) -> bytes:
    """What follows the first dot of a file's name."""
    return name.rpartition(b"/")[2].partition(b".")[2]


def _short_name(header: bytes) -> bytes:
    name = header[:100].partition(b"\0")[0]
    if header[257:263] == b"ustar\0" and header[345]:
        name = header[345:500].partition(b"\0")[0] + b"/" + name
    return name


def _number(field: bytes) -> int | None:
    """A number in octal digits, or in base 256 if the first bit is set; None if it is neither."""
    if field[0] & 0x80:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big") if field[0] != 0xFF else None
    try:
        return int(field.partition(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        return None


def _pax(records: bytes, where: str) -> _Pax:
    """The records `LENGTH KEY=VALUE\\n` that matter."""
    found, at = _NO_PAX, 0
    while at < len(records):
        digits, space, _ = records[at : at + 20].partition(b" ")
        length = int(digits) if space and digits.isdigit() else 0
        key, equals, value = records[at + len(digits) + 1 : at + length].partition(b"=")
        if length <= len(digits) + 1 or at + length > len(records) or not equals or value[-1:] != b"\n":
            raise DamagedShardError(f"{where} is damaged")
        if key == b"path":
            found = found._replace(path=value[:-1].rstrip(b"\0"))
        elif key == b"size":
            if not value[:-1].isdigit() or len(value) > 20:
                raise DamagedShardError(f"{where} is damaged: its size is {value[:20]!r}")
            found = found._replace(size=int(value))
        at += length
    return found


def _check_sums(data: np.ndarray, headers: Sequence[int], shard: str) -> None:
    """DamagedShardError if a header has not the checksum that it names: the sum of its bytes, with spaces in the checksum's place."""
    whole = data[: len(data) // _BLOCK * _BLOCK].reshape(-1, _BLOCK)
    for first in range(0, len(headers), _CHECKED):
        blocks = whole[np.array(headers[first : first + _CHECKED]) // _BLOCK]
        sums = blocks.sum(axis=1, dtype=np.int64) - blocks[:, 148:156].sum(axis=1, dtype=np.int64) + 8 * 32
        digits = blocks[:, 148:154].astype(np.int64) - ord("0")  # the usual form; _number knows the others
        is_right = ((digits >= 0) & (digits < 8)).all(axis=1) & (digits @ 8 ** np.arange(5, -1, -1) == sums)
        for index in np.flatnonzero(~is_right).tolist():
            if _number(blocks[index, 148:156].tobytes()) != sums[index]:
                raise DamagedShardError(
                    f"{shard}: the tar header at byte {headers[first + index]} is damaged: its checksum is wrong"
                )
