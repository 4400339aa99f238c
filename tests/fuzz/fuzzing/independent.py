"""What other programs than the project read of a shard: Python's `tarfile`, `json` and `gzip`, and zstandard.

They say nothing of a shard that they do not read as a whole, or of which they tell less than the project knows.
"""

import gzip
import io
import json
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

_MOST_BYTES = 4 << 20  # of a shard, so that its reader takes most of the memory
_BLANKS = b" \t\r"
_MARK = b"\xef\xbb\xbf"


class Unknown(Enum):
    """What other programs do not tell."""

    TEXT = 1
    """Whether there is a text, and which one."""
    FILE = 2
    """Whether there is such a part: it is a link over links to folders, or to a folder."""


Sample = tuple[bytes, dict[str, bytes]]
"""The key of a sample in a tar file, and its parts."""


class _UnreadError(Exception):
    """The program does not read this shard, or not as a whole."""


def unpacked(name: str, data: bytes) -> bytes | None:
    """The content of a shard, also of one that is not compressed; None if it is damaged or large."""
    try:
        if name.endswith(".gz"):
            content = gzip.GzipFile(fileobj=io.BytesIO(data)).read(_MOST_BYTES + 1)
        elif name.endswith(".zst"):
            import zstandard

            with zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True) as stream:
                content = stream.read(_MOST_BYTES + 1)
        else:
            content = data
    except (OSError, EOFError, zlib.error):
        return None
    except Exception as error:
        if type(error).__name__ != "ZstdError":
            raise
        return None
    return content if len(content) <= _MOST_BYTES else None


def lines_of(data: bytes) -> list[bytes | Unknown | None]:
    """The texts of JSON Lines; None for a line without one."""
    found = list[bytes | Unknown | None]()
    for line in data.split(b"\n"):
        plain = line.removeprefix(_MARK)
        if plain.strip(_BLANKS):
            found.append(_text_of(plain))
    return found


def _text_of(line: bytes) -> bytes | Unknown | None:
    is_twice = False

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal is_twice
        is_twice |= len(dict(pairs)) < len(pairs)  # which of two counts is not said
        return dict(pairs)

    try:
        value = json.loads(line.decode(), object_pairs_hook=once)
    except (ValueError, RecursionError):
        return Unknown.TEXT
    if is_twice:
        return Unknown.TEXT
    text = value.get("text") if isinstance(value, dict) else None
    try:
        return text.encode() if isinstance(text, str) else None
    except UnicodeError:  # a half of a surrogate pair
        return None


def samples_of(data: bytes) -> list[tuple[bytes, Mapping[str, bytes | Unknown]]] | None:
    """The samples of a tar file, in order. None if `tarfile` does not read it to its end."""
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            members = archive.getmembers()
            rest = data[archive.offset :]
            if len(data) % tarfile.BLOCKSIZE or archive.offset > len(data) or rest[: tarfile.BLOCKSIZE].strip(b"\0"):
                return None  # it takes a damaged header as the end
            if any(_is_read_otherwise(data, each) for each in members):
                return None
            return _grouped([(_name_of(each), _content_of(archive, each)) for each in members if _is_part(each)])
    except (tarfile.TarError, _UnreadError, ValueError, OverflowError, OSError, EOFError, KeyError, RecursionError):
        return None


def _is_read_otherwise(data: bytes, member: tarfile.TarInfo) -> bool:
    """Whether `tarfile` reads a name as GNU tar does not: a long one without its end, or with ustar's prefix in a header of GNU."""
    at = member.offset
    while (kind := data[at + 156 : at + 157]) in (b"L", b"K"):
        size = tarfile.nti(data[at + 124 : at + 136])  # type: ignore[attr-defined]
        if b"\0" not in data[at + 512 : at + 512 + size]:
            return True
        at += 512 + -(-size // 512) * 512
    while kind in (b"x", b"X", b"g"):
        at += 512 + -(-tarfile.nti(data[at + 124 : at + 136]) // 512) * 512  # type: ignore[attr-defined]
        kind = data[at + 156 : at + 157]
    return data[at + 345 : at + 346] != b"\0" and data[at + 257 : at + 263] != b"ustar\0"


def _is_part(member: tarfile.TarInfo) -> bool:
    own = member.name.rpartition("/")[2]
    if member.name.endswith("/") or "\0" in member.name or not own:
        raise _UnreadError
    is_file = member.isreg() or member.islnk() or member.issym()
    return is_file and not own.startswith(".")


def _name_of(member: tarfile.TarInfo) -> bytes:
    path = member.pax_headers.get("path", member.name)
    if path.endswith("/") or "\0" in path:
        raise _UnreadError
    return member.name.encode(errors="surrogateescape")


def _content_of(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes | Unknown:
    if not (member.issym() or member.islnk()):
        return _read(archive, member)
    if member.size:
        raise _UnreadError  # pax writes the bytes once more
    return Unknown.FILE if _leads_elsewhere(archive, member) else _read(archive, member)


def _leads_elsewhere(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bool:
    """Whether a link leads to what is no file, or to what `tarfile` finds in another way than a file system would."""
    target = member.linkname
    if not target or target.startswith("/") or "//" in target or "." in target.split("/"):
        return True
    try:
        found = archive._find_link_target(member)  # type: ignore[attr-defined]
    except KeyError:
        return True
    links = {each.name for each in archive if each.issym()}
    return not found.isreg() or any(links & set(_folders_of(each.name)) for each in (member, found))


def _folders_of(name: str) -> list[str]:
    """All folders in which a file is."""
    parts = name.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts))]


def _read(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes | Unknown:
    if member.size > _MOST_BYTES:
        raise _UnreadError
    file = archive.extractfile(member)
    return Unknown.TEXT if file is None else file.read()


def _grouped(files: Sequence[tuple[bytes, bytes | Unknown]]) -> list[tuple[bytes, Mapping[str, bytes | Unknown]]]:
    """Neighbouring files whose names are equal up to the first dot are a sample. Links that may be left out are no neighbours."""
    found, links = list[tuple[bytes, dict[str, bytes | Unknown]]](), list[tuple[bytes, dict[str, bytes | Unknown]]]()
    for name, content in files:
        folder, slash, own = name.rpartition(b"/")
        stem, _, part = own.partition(b".")
        key, its = folder + slash + stem, {part.decode(errors="backslashreplace"): content}
        if content is Unknown.FILE:
            links.append((key, its))
        elif found and found[-1][0] == key:
            found[-1][1].update(its)
        else:
            found.append((key, its))
    for key, its in links:
        next((others for there, others in found if there == key), {}).update(its)
    known = {key for key, _ in found}
    return [*found, *((key, its) for key, its in links if key not in known)]


def check_texts(found: Sequence[bytes | None], expected: Sequence[bytes | Unknown | None]) -> None:
    """AssertionError for other texts than another program reads."""
    assert len(found) == len(expected), f"{len(found)} documents; another program reads {len(expected)}"
    for number, (here, there) in enumerate(zip(found, expected, strict=True)):
        is_same = there is Unknown.TEXT or here == there
        assert is_same, f"number {number} is {here!r:.100}, and {there!r:.100} by another program"


def check_samples(
    found: Sequence[tuple[bytes, Mapping[str, bytes] | None]],
    expected: Sequence[tuple[bytes, Mapping[str, bytes | Unknown]]],
) -> None:
    """AssertionError for other samples than another program reads. None: a sample that the project refuses."""
    told = dict(expected)
    known = [key for key, its in expected if _known(its, its)]
    keys = [key for key, _ in found if key not in told or key in known]
    assert keys == known, f"samples {keys!r:.200}; another program reads {known!r:.200}"
    for key, here in found:
        there = told[key]
        if here is not None:
            its = _known(here, there), _known(there, there)
            assert its[0] == its[1], f"sample {key!r} is {its[0]!r:.200}, and {its[1]!r:.200} by another program"
            continue
        is_odd = len(_known(there, there)) < len(there) or "__key__" in there  # which is the name of a sample
        is_odd |= key.startswith(b"/") or b".." in key.split(b"/")
        assert is_odd, f"sample {key!r} is refused, and another program reads it"


def _known(
    parts: Mapping[str, bytes | Unknown], by_another: Mapping[str, bytes | Unknown]
) -> dict[str, bytes | Unknown]:
    """The parts of which another program tells what they are."""
    return {part: content for part, content in parts.items() if not isinstance(by_another.get(part), Unknown)}
