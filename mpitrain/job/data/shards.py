"""The shards of a source: their names, as users give them, and their sizes.

    data/part-{000..127}.tar        brace ranges, with leading zeros as given, and lists such as {train,extra}
    data/*.jsonl.zst                globs
    s3://bucket/c4/*.parquet        what fsspec opens
    s3://bucket/c4/shards.sha256    lists with checksums: see checksums.py

A shard's name in a list is its path after the folder that all names of the source share. So a list stays the same if its folder moves.
Names have no secrets: see shard_names.py.
"""

import glob
import itertools
import os
import re
import secrets
import stat
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

import ckpt
from ckpt.storage.file_info import FileInfo
from ckpt.storage.local_path import open_given, read_given
from collectives.texts import without_secrets
from mpitrain.job.data.checksums import is_checksum_list, read_checksums
from mpitrain.job.data.documents import ending_of
from mpitrain.job.data.shard_names import Known, shard_marks, shard_names

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MOST_NAMES = 10_000_000
_MOST_LIST_BYTES = 1 << 30  # of a list with checksums
_FEW = 8


class ShardList(NamedTuple):
    """The shards of a source. `folder`: of all of them. `names`: in it, in order; `paths`: or URLs. `sizes`: bytes, int64.

    `checksums`: by the paths of those for which a list has one. `versions`: of remote shards, by their URLs: a text of the store that
    differs after a shard was replaced. `marks`: see shard_marks; () is a "" for each shard. `token`: of this list alone, the same in
    all processes that have it from the one that made it. `listed`: the names of `list_shards`, where a resume keeps other `names` of
    shards for the keys of documents; () if it does not.
    """

    folder: str
    names: tuple[str, ...]
    paths: tuple[str, ...]
    sizes: np.ndarray
    checksums: Mapping[str, bytes] = {}
    versions: Mapping[str, str] = {}
    token: str = ""
    marks: tuple[str, ...] = ()
    listed: tuple[str, ...] = ()

    @property
    def plain_bytes(self) -> int:
        """The bytes of `packed` before it is compressed, at most: paths are not shorter than names, but for a mark."""
        return 8 + sum(64 + 2 * 4 * len(path) for path in self.paths)

    @property
    def known(self) -> Known:
        """The names, sizes and marks."""
        return Known(self.names, self.sizes.tolist(), self.marks or ("",) * len(self.names))

    def packed(self) -> bytes:
        """The names, sizes and marks for a checkpoint. Each start reads the checksums and versions anew."""
        marks = self.known.marks
        texts = [*self.names, *(marks if any(marks) or self.listed else ()), *self.listed]
        data = "\0".join(texts).encode(errors="surrogateescape")
        return zlib.compress(np.int64(len(self.names)).tobytes() + self.sizes.astype("<i8").tobytes() + data, 6)


class Unpacked(NamedTuple):
    """What a checkpoint keeps of its shards. `marks`: see shard_marks; "" for those of earlier versions. `listed`: see ShardList."""

    names: tuple[str, ...]
    sizes: np.ndarray
    marks: tuple[str, ...]
    listed: tuple[str, ...] = ()


def unpacked(data: bytes, most_bytes: int = 1 << 30) -> Unpacked:
    """The shards of `packed`. ValueError if they are damaged, or need more than `most_bytes`."""
    inflated = zlib.decompressobj()
    try:
        plain = inflated.decompress(data, most_bytes)
    except zlib.error as error:
        raise ValueError(f"data: the checkpoint's list of shards is damaged: {error}") from None
    if not inflated.eof:
        what = f"has more than {most_bytes} bytes" if len(plain) == most_bytes else "is cut off"
        raise ValueError(f"data: the checkpoint's list of shards {what}")
    num = int.from_bytes(plain[:8], "little")
    texts = plain[8 + 8 * num :].decode(errors="surrogateescape").split("\0")
    if len(plain) < 8 + 8 * num or len(texts) not in (num, 2 * num, 3 * num):
        raise ValueError(f"data: the checkpoint's list of shards is damaged: it has {len(texts)} names, and says {num}")
    marks, listed = tuple(texts[num : 2 * num]) or ("",) * num, tuple(texts[2 * num :])
    return Unpacked(tuple(texts[:num]), np.frombuffer(plain, "<i8", num, 8).astype(np.int64), marks, listed)


def list_shards(patterns: Sequence[str]) -> ShardList:
    """Find the shards that the patterns name.

    Raises:
        ValueError: a pattern that names no file, a shard that does not exist or is empty, two addresses that may be of one shard, a
            wrong list of checksums, or two checksums of one shard.
    """
    found: dict[str, FileInfo] = {}
    checksums: dict[str, bytes] = {}
    for pattern in patterns:
        names = [pattern] if os.path.exists(pattern) else list(expanded(pattern))
        its = _infos(names)
        if not its:
            raise ValueError(f"data: {without_secrets(pattern)} names no file")
        if not is_checksum_list(pattern):
            found |= its
            continue
        for list_path in sorted(its):
            listed = _of_checksum_list(list_path, its[list_path].size)
            found |= _infos(list(listed), are_patterns=False)
            if twice := [path for path in listed if checksums.get(path, listed[path]) != listed[path]]:
                its_name, its_list = without_secrets(twice[0]), without_secrets(list_path)
                raise ValueError(f"data: {its_name} has two checksums; {its_list} has the second one")
            checksums |= listed
    if not found:
        raise ValueError("data: expected the names of shards, got none")
    if empty := [path for path, its in found.items() if not its.size]:
        raise ValueError(f"data: {without_secrets(empty[0])} is empty; expected documents")
    name_of = dict(zip(found, shard_names(list(found), [its.size for its in found.values()]), strict=True))
    paths = sorted(found, key=lambda path: name_of[path])
    sizes = np.array([found[path].size for path in paths], np.int64)
    versions = {path: found[path].version for path in paths if found[path].version}
    names = [name_of[path] for path in paths]
    folder, shown = in_their_folder(names)
    marks = tuple(shard_marks(paths, names))
    return ShardList(folder, shown, tuple(paths), sizes, checksums, versions, secrets.token_hex(8), marks)


def expanded(pattern: str) -> Iterator[str]:
    """The names of a pattern with brace ranges and lists. ValueError for a range that is no range."""
    pieces = _BRACES.split(pattern)
    choices = [[piece] if i % 2 == 0 else _choices(piece, pattern) for i, piece in enumerate(pieces)]
    if np.prod([len(each) for each in choices], dtype=float) > _MOST_NAMES:
        raise ValueError(f"data: {pattern} names more than {_MOST_NAMES:,} shards")
    return ("".join(parts) for parts in itertools.product(*choices))


def _choices(inside: str, pattern: str) -> list[str]:
    if match := _RANGE.fullmatch(inside):
        first, last = match.groups()
        if int(last) < int(first) or int(last) - int(first) > _MOST_NAMES:
            raise ValueError(f"data: {pattern}: expected a range from a number to a greater one, got {{{inside}}}")
        return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    if "," not in inside:
        raise ValueError(
            f"data: {pattern}: expected a range such as {{000..127}} or a list such as {{a,b}}, got {{{inside}}}"
        )
    return inside.split(",")


def _of_checksum_list(list_path: str, size: int) -> dict[str, bytes]:
    """The paths or URLs that a list of `size` bytes names, with their checksums."""
    folder = ending_of(list_path).rpartition("/")[0]
    try:
        if "://" not in list_path:
            data = read_given(list_path, _MOST_LIST_BYTES)
        elif size > _MOST_LIST_BYTES:
            raise ValueError(f"{without_secrets(list_path)} has {size} bytes; expected at most {_MOST_LIST_BYTES}")
        else:
            data = ckpt.Url(list_path).read()
    except OSError as error:
        raise ValueError(f"data: {without_secrets(list_path)} cannot be read: {error}") from None
    except ValueError as error:
        raise ValueError(f"data: {error}") from None
    return {f"{folder}/{name}": checksum for name, checksum in read_checksums(list_path, data).items()}


def _infos(names: Sequence[str], *, are_patterns: bool = True) -> dict[str, FileInfo]:
    """The files of names or patterns, all paths or all URLs. ValueError if a file is not there."""
    return (_remote if "://" in names[0] else _local)(names, are_patterns)


def _local(names: Sequence[str], are_patterns: bool) -> dict[str, FileInfo]:
    found: dict[str, FileInfo] = {}
    for name in names:
        path = os.path.expanduser(name)
        is_pattern = are_patterns and glob.has_magic(path) and not os.path.exists(path)
        if os.path.isdir(path):
            raise ValueError(f"data: {name} is a folder; expected shards, such as {name.rstrip('/')}/*.jsonl")
        try:
            for each in glob.glob(path, recursive=True) if is_pattern else [path]:
                its = os.stat(each)
                if stat.S_ISREG(its.st_mode):
                    found[os.path.abspath(each)] = FileInfo(its.st_size, "")
                elif not stat.S_ISDIR(its.st_mode):
                    os.close(open_given(each))  # an error that says what it is
        except OSError as error:
            raise ValueError(f"data: {error.filename} cannot be read: {error.strerror or error}") from None
        except ValueError as error:
            raise ValueError(f"data: {error}") from None
    return found


def _remote(names: Sequence[str], are_patterns: bool) -> dict[str, FileInfo]:
    found: dict[str, FileInfo] = {}
    folders: dict[str, dict[str, FileInfo | None]] = {}
    for name in names:
        try:
            if are_patterns and glob.has_magic(name):
                found |= {os.fspath(each): its for each, its in ckpt.Url(name).files().items()}
                continue
            folder, _, file = name.rpartition("/")
            if len(names) > _FEW and folder not in folders:  # one request, and not one for each name
                folders[folder] = ckpt.Url(folder).infos()
            info = folders[folder].get(file) if folder in folders else ckpt.Url(name).info()
        except OSError as error:
            raise ValueError(f"data: {without_secrets(name)} cannot be read: {error}") from None
        if info is None:
            raise ValueError(f"data: {without_secrets(name)} cannot be read: there is no such file")
        found[name] = info
    return found


def in_their_folder(paths: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """The folder of all paths, and their names in it."""
    folder = _common_folder(sorted(paths))
    return folder, tuple(path[len(folder) + 1 :] if folder else path for path in paths)


def _common_folder(paths: Sequence[str]) -> str:
    """The longest folder in which all paths are. They are sorted."""
    if len(paths) == 1:
        return str(paths[0].rpartition("/")[0])
    first, last = (path.split("/")[:-1] for path in (paths[0], paths[-1]))
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return "/".join(part for part, _ in same)
