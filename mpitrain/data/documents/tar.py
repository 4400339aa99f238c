"""Samples in tar files, as WebDataset names them: neighbouring files that differ in what follows the first dot are parts of one sample.

    0001.txt 0001.json 0002.txt ...       the samples 0001, with the parts txt and json, and 0002

The places of all files are found once. A loop goes from header to header, and reads little more than the sizes: they alone say where
the next header is, because the bytes of a member may look like one. NumPy then takes some hundred headers at a time for checksums,
kinds and names. A reader keeps two integers of each file and the key of each sample.

Formats: ustar with its prefix, pax, GNU's long names, and sizes in octal digits or base 256. A header with a wrong checksum ends the
shard: where the next one is cannot be known. Source of the formats: POSIX.1-2017, pax, "ustar Interchange Format"; GNU tar manual,
"Basic Tar Format".
"""

from collections.abc import Iterator
from struct import Struct
from typing import NamedTuple

import numpy as np

from mpitrain.data.documents.reading import DamagedSampleError, DamagedShardError, MappedFile

_BLOCK = 512
_MOST_HEADER_BYTES = 1 << 20  # of a long name or pax header
_PIECE = 512  # headers at a time: 256 KiB, which stay in a core's cache
_SIZE_AND_KIND = Struct("124x11sB20xB")  # of a header: the digits of the size, what ends them, and the kind
_FILE, _FILE_KINDS = ord("0"), b"0\x007"  # regular files; 7 is a contiguous one
_BEFORE_A_FILE = b"LKxg"  # long name, long link, pax, global pax
_WITH_NAMES, _PAX = b"Lx", ord("x")


class _Pax(NamedTuple):
    """What a pax header says of the next file."""

    path: bytes = b""
    size: int | None = None


_NO_PAX = _Pax()


class _Members(NamedTuple):
    """Where the headers are, and the sizes of their members, int64.

    `names`: those that are not in the file's own header, by its place. `flaw`: what the end of the file shows to be missing, or "".
    """

    headers: np.ndarray
    sizes: np.ndarray
    names: dict[int, bytes]
    flaw: str


class TarReader:
    """The samples in the bytes `begin` to `end - 1` of a tar file, by default all of it.

    `part`: of a sample that is its text, such as "json"; None: the only one or "txt".

    DamagedShardError if a header is damaged, or the file ends within a member.
    """

    begins: np.ndarray
    """The byte where each sample begins, int64: it ends before the next one."""

    def __init__(self, file: MappedFile, part: str | None = None, *, begin: int = 0, end: int | None = None) -> None:
        self.file, self.part = file, part
        self._index(begin, file.size if end is None else end)

    def cut(self, begin: int, end: int) -> "TarCut":
        """See Reader."""
        first, last = np.searchsorted(self.begins, (begin, end)).tolist()
        firsts = self._firsts[first : last + 1]
        files = slice(firsts[0], firsts[-1])
        begins = self._headers[files] + _BLOCK
        return TarCut(
            self,
            self._keys[first:last],
            begins.tolist(),
            (begins + self._sizes[files]).tolist(),
            (firsts - firsts[0]).tolist(),
        )

    def close(self) -> None:
        """See Reader."""
        self.file.close()

    def name(self, header: int) -> bytes:
        """The name of the file with its header at this byte."""
        return self._names.get(header) or _short_name(self.file.bytes[header : header + _BLOCK])

    def _index(self, begin: int, end: int) -> None:
        """Find all files and samples from the byte `begin` to the byte `end - 1`."""
        headers, sizes, self._names, flaw = _walk(self.file, begin, end)
        kinds, firsts = [np.empty(0, np.uint8)], []
        self._keys: list[bytes] = []
        num_files, last_key = 0, None
        for places, blocks in _checked(self.file, headers):
            kinds.append(blocks[:, 156].copy())
            are_files = _are(_FILE_KINDS, kinds[-1])
            names = self._names_of(places[are_files], blocks[are_files])
            for file, name in enumerate(names, num_files):
                key = _key_of(name)
                if key != last_key:
                    firsts.append(file)
                    self._keys.append(key)
                    last_key = key
            num_files += len(names)
        if flaw:
            raise DamagedShardError(f"{self.file.name}: the file is cut off: it has {self.file.size} bytes, and {flaw}")
        kind = np.concatenate(kinds)
        are_files = _are(_FILE_KINDS, kind)
        self._headers, self._sizes = headers[are_files], sizes[are_files]
        self._firsts = np.array([*firsts, num_files], np.int64)
        # Headers that say more of the next file belong to it: a sample begins with those of its first file.
        begins = headers.copy()
        begins[1:][_are(_BEFORE_A_FILE, kind)[:-1]] = 0
        self.begins = np.maximum.accumulate(begins)[are_files][self._firsts[:-1]]
        all_keys = b"/".join([b"", *self._keys])
        self.are_safe = b".." not in all_keys and b"//" not in all_keys
        """Whether no key has a `..` or begins with a slash. Most files have none, and their samples need no check one by one."""

    def _names_of(self, headers: np.ndarray, blocks: np.ndarray) -> list[bytes]:
        """The names of the files with these headers."""
        names = [name.partition(b"\0")[0] for name in blocks[:, :100].copy().view("S100")[:, 0].tolist()]
        for index in np.flatnonzero(blocks[:, 345]).tolist():
            names[index] = _short_name(blocks[index].tobytes())
        if self._names:
            names = [self._names.get(header) or name for header, name in zip(headers.tolist(), names, strict=True)]
        return names


class TarCut:
    """Neighbouring samples of a tar file. See Cut.

    `begins`, `ends`: of their files. `firsts`: the first file of each sample, and the end of the last one.
    """

    def __init__(
        self, reader: TarReader, keys: list[bytes], begins: list[int], ends: list[int], firsts: list[int]
    ) -> None:
        self._reader, self._keys, self._begins, self._ends, self._firsts = reader, keys, begins, ends, firsts
        self._bytes = reader.file.bytes
        self._is_plain = reader.are_safe and reader.part is None

    def __len__(self) -> int:
        return len(self._keys)

    def key(self, index: int) -> bytes:
        """The name of a sample's files up to the first dot."""
        return self._keys[index]

    def text(self, index: int) -> bytes:
        """The part of a sample that is its text."""
        first, end = self._firsts[index], self._firsts[index + 1]
        if self._is_plain and end - first == 1:  # nearly always, so it comes first
            return self._bytes[self._begins[first] : self._ends[first]]
        self._check_key(index)
        if self._reader.part is None and end - first == 1:
            return self._bytes[self._begins[first] : self._ends[first]]
        wanted = (self._reader.part or "txt").encode()
        for file in range(first, end):
            if _part_of(self._name(file)) == wanted:
                return self._bytes[self._begins[file] : self._ends[file]]
        raise DamagedSampleError(
            f"{self.where(index)}: expected a part {wanted.decode()!r}, got {sorted(self.parts(index))}"
        )

    def parts(self, index: int) -> dict[str, bytes]:
        """The parts of a sample by what follows the first dot of their names. DamagedSampleError for a name that is no key."""
        self._check_key(index)
        files = range(self._firsts[index], self._firsts[index + 1])
        return {
            _part_of(self._name(file)).decode(errors="replace"): self._bytes[self._begins[file] : self._ends[file]]
            for file in files
        }

    def _check_key(self, index: int) -> None:
        """DamagedSampleError for a name that would leave a folder if somebody unpacked the file: it is no key of an honest sample."""
        key = self._keys[index]
        if key[:1] == b"/" or b".." in key.split(b"/"):
            raise DamagedSampleError(f"{self.where(index)}: expected a relative name without '..'")

    def where(self, index: int) -> str:
        """A sample, for messages."""
        return f"{self._reader.file.name}, sample {self.key(index).decode(errors='replace')!r}"

    def _name(self, file: int) -> bytes:
        return self._reader.name(self._begins[file] - _BLOCK)


def _walk(file: MappedFile, at: int, size: int) -> _Members:
    """Go from header to header, from the byte `at` to the byte `size - 1`. DamagedShardError for one without a size, and for damaged
    names."""
    data, shard, fields_of = file.bytes, file.name, _SIZE_AND_KIND.unpack_from
    headers: list[int] = []
    sizes: list[int] = []
    names: dict[int, bytes] = {}
    long_name, pax, flaw = b"", _NO_PAX, ""
    has_more = False  # a header before this one is about the same file
    while at + _BLOCK <= size:
        digits, end, kind = fields_of(data, at)
        try:
            num_bytes = int(digits, 8)
        except ValueError:
            num_bytes = -1
        if num_bytes < 0 or end not in b"\0 ":
            header = data[at : at + _BLOCK]
            if not header.strip(b"\0"):
                break  # two empty blocks end the archive; what follows one is no member either
            num_bytes = _number(header[124:136])
            if num_bytes < 0:
                raise DamagedShardError(f"{shard}: the tar header at byte {at} is damaged: it has no size")
        if kind != _FILE or has_more:
            if kind in _FILE_KINDS and pax.size is not None:
                num_bytes = pax.size
            place = at + _BLOCK
            if kind in _WITH_NAMES and place + num_bytes <= size:
                if num_bytes > _MOST_HEADER_BYTES:
                    raise DamagedShardError(f"{shard}: the tar header at byte {at} has {num_bytes} bytes of names")
                if kind == _PAX:
                    pax = _pax(data[place : place + num_bytes], f"{shard}: the pax header at byte {at}")
                else:
                    long_name = data[place : place + num_bytes].rstrip(b"\0")
                has_more = True
            elif kind not in _BEFORE_A_FILE:
                if name := pax.path or long_name:
                    names[at] = name
                long_name, pax, has_more = b"", _NO_PAX, False
        headers.append(at)
        sizes.append(num_bytes)
        at += _BLOCK + (num_bytes + _BLOCK - 1) // _BLOCK * _BLOCK
    else:
        if at < size:
            flaw = f"its header at byte {at} has {_BLOCK}"
        elif at > size:
            end = headers[-1] + _BLOCK + sizes.pop()
            flaw = (
                f"its member at byte {headers[-1]} ends at byte {end}"
                if end > size
                else f"its last member ends at byte {at}"
            )
    return _Members(np.fromiter(headers, np.int64), np.fromiter(sizes, np.int64), names, flaw)


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


def _number(field: bytes) -> int:
    """A number in octal digits, or in base 256 if the first bit is set. A negative number if it is neither."""
    if field[0] & 0x80:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big") if field[0] != 0xFF else -1
    try:
        return int(field.partition(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        return -1


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


def _are(some: bytes, kinds: np.ndarray) -> np.ndarray:
    """Which of the kinds, uint8, are some of these."""
    return np.isin(kinds, np.frombuffer(some, np.uint8))


def _checked(file: MappedFile, headers: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Some headers at a time: where they begin, and their bytes, uint8 of shape (headers, 512).

    DamagedShardError if a header has not the checksum that it names: the sum of its bytes, with spaces in the checksum's place.
    """
    whole = np.frombuffer(file.bytes, np.uint8, file.size // _BLOCK * _BLOCK).reshape(-1, _BLOCK)
    for first in range(0, len(headers), _PIECE):
        places = headers[first : first + _PIECE]
        blocks = whole.take(places // _BLOCK, axis=0)
        sums = blocks.sum(axis=1, dtype=np.uint32) - blocks[:, 148:156].sum(axis=1, dtype=np.uint32) + 8 * 32
        digits = blocks[:, 148:154].astype(np.int64) - ord("0")  # the usual form; _number knows the others
        is_right = ((digits >= 0) & (digits < 8)).all(axis=1) & (digits @ 8 ** np.arange(5, -1, -1) == sums)
        for index in np.flatnonzero(~is_right).tolist():
            if _number(blocks[index, 148:156].tobytes()) != sums[index]:
                raise DamagedShardError(
                    f"{file.name}: the tar header at byte {places[index]} is damaged: its checksum is wrong"
                )
        yield places, blocks
