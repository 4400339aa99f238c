"""Samples in tar files, as WebDataset names them: neighbouring files that differ in what follows the first dot are parts of one sample.

    0001.txt 0001.json 0002.txt ...       the samples 0001, with the parts txt and json, and 0002

The places of all files are found once. A reader keeps four integers of each file and the key of each sample.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from mpitrain.job.data.documents.heads import HEAD_BYTES, other_than
from mpitrain.job.data.documents.reading import (
    MOST_DOCUMENT_BYTES,
    DamagedSampleError,
    DamagedShardError,
    MappedFile,
    check_length,
)
from mpitrain.job.data.documents.tar.entries import Place, TarEntries, entries_of
from mpitrain.job.data.documents.tar.links import plain_name
from mpitrain.job.data.documents.tar.sparse import Extents

_MOST_BYTES = 8 << 30  # of a sample; a tar file with holes, or with links to one large file, may say any number
_MOST_PARTS = 1 << 14  # of a sample
_MOST_SHOWN = 8  # names in a message


class TarReader:
    """The samples in the bytes `begin` to `end - 1` of a tar file, by default all of it.

    `part`: of a sample that is its text, such as "json"; None: the only one or "txt". `links`: those of a reader of the whole file, for
    a reader of a part of it.

    DamagedShardError if a header is damaged or of an unknown kind, the file ends within a member, another archive follows, the files of
    a sample stand apart, or two have one name.
    """

    begins: np.ndarray
    """The byte where each sample begins, int64: it ends before the next one."""
    remark: str
    """See Reader."""

    def __init__(
        self,
        file: MappedFile,
        part: str | None = None,
        *,
        begin: int = 0,
        end: int | None = None,
        links: Mapping[int, Place] | None = None,
    ) -> None:
        self.file, self.part = file, part
        try:
            entries = entries_of(file, begin, file.size if end is None else end, links)
        except DamagedShardError:
            if other := other_than("a tar file", file.bytes[:HEAD_BYTES]):
                raise DamagedShardError(f"{file.name}: {other}") from None
            raise
        self._keys, firsts = _grouped(entries.names)
        all_keys = b"\0/".join([b"", *self._keys])
        are_safe = b".." not in all_keys and b"//" not in all_keys  # no key leads out of a folder
        _check_names(
            file, entries, _plain(self._keys, all_keys) if b"./" in all_keys or not are_safe else self._keys, firsts
        )
        self._firsts = np.array([*firsts, len(entries.names)], np.int64)
        self.begins, self.remark = entries.starts[self._firsts[:-1]], entries.remark
        longest = int(entries.sizes.max(initial=0))
        self.is_plain = are_safe and not entries.odd and longest <= MOST_DOCUMENT_BYTES
        """Whether a sample of one file can be read without a check, as in most tar files."""
        self.entries = entries._replace(names=[])  # the keys have most of each, and a header all of it

    def cut(self, begin: int, end: int) -> "TarCut":
        """See Reader."""
        first, last = np.searchsorted(self.begins, (begin, end)).tolist()
        firsts = self._firsts[first : last + 1]
        files = slice(firsts[0], firsts[-1])
        begins = self.entries.begins[files]
        before = int(self.begins[first - 1]) if first else 0  # an entry of this sample may have hidden where one began
        after = max(end, int(self.begins[last]) if last < len(self.begins) else self.file.size)
        return TarCut(
            self,
            self._keys[first:last],
            self.entries.headers[files],
            begins.tolist(),
            (begins + self.entries.sizes[files]).tolist(),
            (firsts - firsts[0]).tolist(),
            (before, after),
        )

    def close(self) -> None:
        """See Reader."""
        self.file.close()


class TarCut:
    """Neighbouring samples of a tar file. See Cut.

    `headers`, `begins`, `ends`: of their files. `firsts`: the first file of each sample, and the end of the last one. `around`: a byte
    before the samples, and one after all of their files, between which readers of version 1 found the same samples or others.
    """

    def __init__(
        self,
        reader: TarReader,
        keys: list[bytes],
        headers: np.ndarray,
        begins: list[int],
        ends: list[int],
        firsts: list[int],
        around: tuple[int, int],
    ) -> None:
        self._reader, self._keys, self._firsts, self._around = reader, keys, firsts, around
        self._headers, self._begins, self._ends = headers, begins, ends
        self._bytes = reader.file.bytes
        self._is_plain = reader.part is None and reader.is_plain

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
            return self._text(index, first)
        wanted, names = (self._reader.part or "txt").encode(), list[bytes]()
        for file in self._files(index):
            names.append(_part_of(self._name(file)))
            if names[-1] == wanted:
                return self._text(index, file)
        got, num = ", ".join(map(_shown, sorted(names)[:_MOST_SHOWN])), len(names)
        more = f", ... ({num} parts)" * (num > _MOST_SHOWN)
        raise DamagedSampleError(f"{self.where(index)}: expected a part {wanted.decode()!r}, got [{got}{more}]")

    def is_as_before(self) -> bool:
        """Whether readers of version 1 gave the same samples."""
        begin, end = np.searchsorted(self._reader.entries.changed, self._around).tolist()
        return bool(begin == end)

    def parts(self, index: int) -> dict[str, bytes]:
        """The parts of a sample by what follows the first dot of their names.

        DamagedSampleError for a name that is no key, for a part that cannot be read, and if the parts are too many or too large.
        """
        self._check_key(index)
        files = self._files(index)
        if (num_bytes := self._num_bytes(files)) > _MOST_BYTES:
            raise DamagedSampleError(
                f"{self.where(index)}: a sample with {num_bytes} bytes; expected {_MOST_BYTES} at most"
            )
        found = {
            _part_of(self._name(file)).decode(errors="backslashreplace"): self._content(index, file) for file in files
        }
        if len(found) < len(files):
            raise DamagedSampleError(f"{self.where(index)}: two of its parts have one name")
        return found

    def _files(self, index: int) -> range:
        """The files of a sample. DamagedSampleError if they are too many."""
        files = range(self._firsts[index], self._firsts[index + 1])
        if len(files) > _MOST_PARTS:
            raise DamagedSampleError(
                f"{self.where(index)}: a sample with {len(files)} parts; expected {_MOST_PARTS} at most"
            )
        return files

    def _check_key(self, index: int) -> None:
        """DamagedSampleError for a name that would leave a folder if somebody unpacked the file: it is no key of an honest sample."""
        key = self._keys[index]
        if key[:1] == b"/" or b".." in key.split(b"/"):
            raise DamagedSampleError(f"{self.where(index)}: expected a relative name without '..'")

    def where(self, index: int) -> str:
        """A sample, for messages."""
        return f"{self._reader.file.name}, sample {_shown(self.key(index))}"

    def _name(self, file: int) -> bytes:
        return self._reader.entries.name(self._reader.file, int(self._headers[file]))

    def _text(self, index: int, file: int) -> bytes:
        check_length(self._ends[file] - self._begins[file], self.where(index))
        return self._content(index, file)

    def _odd(self, file: int) -> Extents | str | None:
        """What `TarEntries.odd` says of a file."""
        odd = self._reader.entries.odd
        return odd.get(int(self._headers[file])) if odd else None

    def _num_bytes(self, files: range) -> int:
        """The bytes of files, with the holes of sparse ones."""
        its = slice(files.start, files.stop)
        packed = sum(self._ends[its]) - sum(self._begins[its])
        sparse = map(self._odd, files) if self._reader.entries.odd else ()
        return packed + sum(each.size for each in sparse if isinstance(each, Extents))

    def _content(self, index: int, file: int) -> bytes:
        """The bytes of a file of a sample. DamagedSampleError for a link that leads nowhere, and a sparse file that is too large."""
        its = self._odd(file)
        if its is None:
            return self._bytes[self._begins[file] : self._ends[file]]
        if isinstance(its, str):
            raise DamagedSampleError(f"{self.where(index)}, {_shown(self._name(file))}: {its}")
        return its.read(self._bytes)


def _grouped(names: Sequence[bytes]) -> tuple[list[bytes], list[int]]:
    """The keys of samples, and the first file of each: neighbours with one key are a sample."""
    keys: list[bytes] = []
    firsts: list[int] = []
    last_key = None
    for file, name in enumerate(names):
        dot = name.find(b".", name.rfind(b"/") + 1)
        key = name if dot < 0 else name[:dot]
        if key != last_key:
            firsts.append(file)
            keys.append(key)
            last_key = key
    return keys, firsts


def _plain(keys: Sequence[bytes], all_keys: bytes) -> Sequence[bytes]:
    """The plain names of keys. `all_keys`: them with `\\0/` before each. Most have `./` before them, or none has."""
    stripped = all_keys.replace(b"\0/./", b"\0/")
    if b"./" in stripped or b"//" in stripped:
        return [plain_name(key) for key in keys]
    return stripped.split(b"\0/")[1:]


def _check_names(file: MappedFile, entries: TarEntries, keys: Sequence[bytes], firsts: Sequence[int]) -> None:
    """DamagedShardError if a key or a name comes twice: a sample would be several, or it would have one of two files.

    `keys`: of all samples, plain.
    """
    names = entries.names
    if len(set(keys)) == len(keys) and (len(names) == len(keys) or len(set(names)) == len(names)):
        return
    plain_names, seen = [plain_name(name) for name in names], dict[bytes, int]()
    for index, name in enumerate(plain_names):
        if (first := seen.setdefault(name, index)) != index:
            raise DamagedShardError(
                f"{file.name}: two files have the name {_shown(name)}, at the bytes {entries.headers[first]} and "
                f"{entries.headers[index]}; expected one (tar --append and --update add a file again, and unpacking takes the last one)"
            )
    groups = dict[bytes, int]()
    for key, index in zip(keys, firsts, strict=True):
        if (first := groups.setdefault(key, index)) != index:
            raise DamagedShardError(
                f"{file.name}: the files of the sample {_shown(key)} stand apart: {_shown(names[first])} is at byte "
                f"{entries.headers[first]}, and {_shown(names[index])} at byte {entries.headers[index]}; expected them to follow one "
                "another, as in a tar file of a folder by `tar --sort=name`"
            )


def _shown(name: bytes) -> str:
    return repr(name[:200].decode(errors="replace"))


def _part_of(name: bytes) -> bytes:
    """What follows the first dot of a file's name."""
    return name.rpartition(b"/")[2].partition(b".")[2]
