"""The files of a folder of text: which of them are taken, and which links are followed.

Hidden files and folders and `__pycache__` are left out, and links to folders are not followed. Each name is a file of its own: so a
file of which the folder has a link, too, comes twice. A link to a file that is not in the
folder is an error: a folder of a stranger could name any file of the machine. One layout of such links is known, the cache of the
Hugging Face hub:

    REPOSITORY/snapshots/REVISION/a.txt     a link to ../../blobs/HASH
    REPOSITORY/blobs/HASH
"""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from collectives.texts import shown
from mpitrain.job.data.documents.heads import HEAD_BYTES, are_documents, begins_with_json, is_json_lines, other_format
from mpitrain.job.data.documents.kinds import is_compressed, kind_of


class TextFile(NamedTuple):
    """A file. `name`: its path in the folder. `size`: bytes. `is_json`: whether it begins with JSON."""

    name: str
    path: Path
    size: int
    is_json: bool = False

    def looked_into(self, head: bytes | None = None) -> "TextFile":
        """The file with what its first bytes say. ValueError if it is of another format, or cannot be read."""
        head = _head_of(self.path) if head is None else head
        if other := other_format(head):
            raise ValueError(f"data.path: expected text, got {self.path}, which is {other}")
        return self._replace(is_json=begins_with_json(head))


def files_of(
    root: Path,
    suffixes: tuple[str, ...],
    *,
    skipped: frozenset[str],
    follow_links: bool,
    field: str,
    say: Callable[[str], object],
) -> list[TextFile]:
    """The files of a folder that are not empty, by name.

    Args:
        root: the folder.
        suffixes: the endings of the files that are taken. Empty: those that look like text (no zero byte in the first 4 KiB).
        skipped: names of folders that are left out.
        follow_links: whether links may lead out of the folder.
        field: of the text, if a file has JSON Lines.
        say: gets lines about what is left out.

    Raises:
        ValueError: links that lead out of the folder, a file that cannot be read, or more bytes in shards of documents than in texts.
    """
    links = _Links(root)
    others = list[str]()
    found = sorted(file for file in _walk(root, skipped, links, suffixes, others) if file.size)
    links.check(say, follow_links)
    if suffixes:
        _say_others(root, others, say)
        return [file.looked_into(head) for file, head in _heads(found)]
    return _texts(root, found, others, field, say)


def _head_of(path: Path) -> bytes:
    """The first bytes of a file of text. ValueError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(HEAD_BYTES)
    except OSError as error:
        raise ValueError(f"data.path: {path} cannot be read: {error.strerror or error}") from error


def _heads(files: list[TextFile]) -> Iterator[tuple[TextFile, bytes]]:
    """The first bytes of the files that are still there."""
    for file in files:
        try:
            head = _head_of(file.path)
        except ValueError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                continue
            raise
        yield file, head


class _Links:
    """The links of a folder."""

    def __init__(self, root: Path) -> None:
        self._root, self._real = root, Path(os.path.realpath(root))
        self._leaving: list[str] = []
        self._dead: list[str] = []
        self._folders: list[str] = []

    def size_of(self, path: str) -> int | None:
        """The bytes of the file that a link leads to; None if it is none."""
        real = Path(os.path.realpath(path))
        try:
            its = os.stat(real, follow_symlinks=False)
        except OSError:
            self._dead.append(path)
            return None
        if not stat.S_ISREG(its.st_mode):
            self._dead.append(path)
            return None
        if not real.is_relative_to(self._real) and not self._is_blob(real):
            self._leaving.append(path)
        return its.st_size

    def add_folder(self, path: str) -> None:
        """Add a link to a folder, which is not followed."""
        self._folders.append(path)

    def check(self, say: Callable[[str], object], follow_links: bool) -> None:
        """ValueError for links that lead out of the folder, if they may not. Others that are not followed are named."""
        if self._leaving and not follow_links:
            first = min(self._leaving)
            raise ValueError(
                f"data.path: {self._root} has {_number(self._leaving, 'link')} out of the folder, the first one {shown(first)}, which "
                f"leads to {shown(os.path.realpath(first))}; remove them, or allow such links with --data.follow-links true"
            )
        if self._dead:
            say(f"{self._root} has {_number(self._dead, 'link')} to no file, the first one {shown(min(self._dead))}")
        if self._folders:
            say(
                f"{self._root} has {_number(self._folders, 'link')} to a folder, not followed, the first one "
                f"{shown(min(self._folders))}; name the folder in data.path, too"
            )

    def _is_blob(self, real: Path) -> bool:
        """Whether a file is a blob of the repository of the Hugging Face hub of which the folder is a snapshot."""
        return real.parent.name == "blobs" and self._real.is_relative_to(real.parent.parent / "snapshots")


def _walk(
    root: Path, skipped: frozenset[str], links: _Links, suffixes: tuple[str, ...], others: list[str]
) -> Iterator[TextFile]:
    """The files, also empty ones. `others` gets the names of pipes, sockets and devices."""

    def fail(error: OSError) -> None:
        if isinstance(error, FileNotFoundError):  # it was there a moment ago
            return
        raise ValueError(f"data.path: {error.filename} cannot be read: {error.strerror or error}") from error

    for folder, below, names in os.walk(root, onerror=fail):
        below[:] = [b for b in below if not b.startswith(".") and b != "__pycache__" and b not in skipped]
        for name in below:
            if os.path.islink(path := os.path.join(folder, name)):
                links.add_folder(path)
        for name in names:
            path = os.path.join(folder, name)
            inside = os.path.relpath(path, root)
            if name.startswith(".") or not inside.endswith(suffixes or ""):
                continue
            try:
                its = os.lstat(path)
            except FileNotFoundError:
                continue
            if stat.S_ISLNK(its.st_mode):
                if (size := links.size_of(path)) is not None:
                    yield TextFile(inside, Path(path), size)
            elif stat.S_ISREG(its.st_mode):
                yield TextFile(inside, Path(path), its.st_size)
            else:
                others.append(inside)


def _say_others(root: Path, others: list[str], say: Callable[[str], object]) -> None:
    if others:
        say(
            f"{root} has {_number(others, 'file')} of other formats than text, left out, the first one {shown(min(others))}"
        )


def _texts(
    root: Path, files: list[TextFile], others: list[str], field: str, say: Callable[[str], object]
) -> list[TextFile]:
    """The files that look like text. `others`: see `_walk`. ValueError if shards of documents have more bytes than they."""
    texts, left_out, lines = list[TextFile](), list[TextFile](), list[TextFile]()
    text_bytes = 0
    for file, head in _heads(files):
        kind = kind_of(file.name)
        if b"\0" in head or other_format(head):
            if kind in ("tar", "parquet") or (kind == "lines" and is_compressed(file.name)):
                left_out.append(file)
            else:
                others.append(file.name)
            continue
        texts.append(file._replace(is_json=begins_with_json(head)))
        # Programs have their settings, words and maps in .json, too.
        if (
            kind == "lines"
            and is_json_lines(head)
            and (file.path.suffix.lower() != ".json" or are_documents(head, field))
        ):
            lines.append(file)
        else:
            text_bytes += file.size
    _say_others(root, others, say)
    shards = [*left_out, *lines]
    if not shards:
        return texts
    if sum(shard.size for shard in shards) > text_bytes:
        raise ValueError(
            f"data.path: {root} is a folder of documents in shards, {len(shards)} of {len(files)} files, the first one "
            f"{shown(min(shards).name)}; name them by a pattern in quotes, such as '{_pattern(root, min(shards))}', or the endings of "
            "texts by --data.suffixes"
        )
    for some, one, what in ((left_out, "shard", "documents, left out"), (lines, "file", "JSON Lines, read as text")):
        if some:
            say(
                f"{root} has {_number(some, one)} of {what}, the first one {shown(min(some).name)}; a pattern in quotes, such as "
                f"'{_pattern(root, min(some))}', reads shards"
            )
    return texts


def json_remark(files: list[Path]) -> str:
    """A line about files of text that begin with JSON."""
    return (
        f"{_number(files, 'file')} of text begin{'s' * (len(files) == 1)} with JSON, the first one {shown(str(files[0]))}; a pattern "
        "in quotes that ends in .jsonl or .json reads JSON Lines as documents"
    )


def _pattern(root: Path, shard: TextFile) -> str:
    """A pattern for the shards of a folder that have the ending of this one."""
    return shown(f"{root}/{'**/' * ('/' in shard.name)}*{_ending(shard.name)}")


def _ending(name: str) -> str:
    """The ending of a shard's name, such as .json.gz."""
    parts = name.rpartition("/")[2].split(".")
    return "".join(f".{part}" for part in parts[1:][-2 if is_compressed(name) else -1 :])


def _number(some: list[str] | list[Path] | list[TextFile], what: str) -> str:
    return f"{len(some)} {what}{'s' * (len(some) > 1)}"
