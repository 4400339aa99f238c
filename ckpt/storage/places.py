"""Places of checkpoints: finds the local or remote place of a path, and reads the manifest in it.

A local place is a `LocalPath`, whose files are read with `preadv` directly into the target memory. A remote place is a `Url`. Both have
the same methods. validation.py checks everything that is read from them.
"""

import io
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ckpt.format.manifest import FILE_NAME, FORMAT, MAX_BYTES, MAX_LINE_BYTES, CheckpointError
from ckpt.format.validation import Header, decode_header, out_of_reach, refused
from ckpt.storage.local_path import LocalFile, LocalFolder, LocalPath
from ckpt.storage.remote import RemoteFile, RemoteFolder, Url
from collectives.texts import without_secrets

_BEGINNING = json.dumps({"format": FORMAT}, separators=(",", ":")).encode()[:-1]  # the beginning of every manifest

Place = LocalPath | Url
Folder = LocalFolder | RemoteFolder
OpenFile = LocalFile | RemoteFile


def place_of(path: str | os.PathLike[str]) -> Place:
    """The place of a path: a `Url` if it has "://", but "file://" is a local folder.

    A "~" at the beginning is the user's home, as in a shell. TypeError for other types, also for bytes. ValueError if there is no
    home, or if fsspec, or the package for this kind of URL, is missing.
    """
    text = text_of(path)
    if isinstance(path, Path) or "://" not in text:
        return LocalPath(_at_home(text) if text.startswith("~") else path)
    scheme, _, rest = text.partition("://")
    if scheme == "file":
        return LocalPath(rest)
    try:
        import fsspec

        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        raise ValueError(
            f"{without_secrets(text)} cannot be reached: {error}; pip install 'mpitrain[remote]' brings what S3 needs"
        ) from error
    except ValueError as error:
        raise ValueError(f"{without_secrets(text)} cannot be reached: {error}") from error
    return Url(text)


def text_of(path: str | os.PathLike[str]) -> str:
    """A path as a text. TypeError for a value that is no path."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str):
        hint = ", which os.fsdecode makes of bytes" if isinstance(text, bytes) else ""
        raise TypeError(f"{path!r:.200} is no path; expected a str{hint}, or a pathlib.Path")
    return text


def _at_home(text: str) -> str:
    expanded = os.path.expanduser(text)  # "~name" without such a user is a plain name
    if expanded.startswith("~/") or expanded == "~":
        raise ValueError(f"{text!r} cannot be found: this user has no home; expected a path without '~'")
    return expanded


def absolute(path: str | os.PathLike[str]) -> Place:
    """The place of a path; a local folder as an absolute path."""
    return place_of(path).abspath()


def local_path(path: str | os.PathLike[str], name: str, expected: str) -> LocalPath:
    """An absolute local path. ValueError for a URL; its message has the argument's `name` and the `expected` value."""
    place = absolute(path)
    if isinstance(place, Url):
        raise ValueError(f"{name} is {place}; expected {expected}")
    return place


Paths = Sequence[str | os.PathLike[str]]


def all_places(paths: Paths | None) -> tuple[Place, ...]:
    """The places of a list of paths, absolute. TypeError if it is no list of folders and URLs."""
    if paths is None:
        return ()
    if not isinstance(paths, list | tuple) or not all(isinstance(path, str | os.PathLike) for path in paths):
        raise TypeError(f"copies is {paths!r}; expected a list of folders and URLs")
    return tuple(map(absolute, paths))


def copies_of(path: str | os.PathLike[str] | None, copies: Paths | None) -> list[Place]:
    """The places, each once, of the checkpoint `path` and of its copies, which have its name in `copies`. CheckpointError for None."""
    if path is None:
        raise CheckpointError(
            "there is no checkpoint: the path is None, the result of ckpt.latest(folder) if no checkpoint is complete (a save in the "
            "background is complete after ckpt.wait())"
        )
    first = absolute(path)
    return list(dict.fromkeys([first, *(place / first.name for place in all_places(copies))]))


def write_and_read_back(file: Place, data: bytes) -> None:
    """Write a file with `data`, and read it back. OSError if the bytes differ."""
    file.write(data)
    if file.read() != data:
        raise OSError(f"{file} does not read as it was written")


def read_header(place: Place) -> Header:
    """The header of the checkpoint at `place`. Raises CheckpointError or OSError."""
    with _manifest_of(place, buffer_bytes=64 << 10) as (file, _):
        return decode_header(file.readline(MAX_LINE_BYTES + 1))


def read_bytes(place: Place) -> bytes:
    """The bytes of the manifest at `place`. Raises CheckpointError or OSError.

    The memory is limited by the bytes on the disk: a hole in the file reads as zeros, and reading stops there.
    """
    with _manifest_of(place, buffer_bytes=1 << 20) as (file, nbytes):
        if nbytes > MAX_BYTES:
            raise out_of_reach(f"it has {nbytes} bytes, expected at most {MAX_BYTES}")
        line = file.readline(MAX_LINE_BYTES + 1)
        decode_header(line)
        data = io.BytesIO()
        data.write(line)
        while piece := file.read(1 << 20):
            if b"\0" in piece:
                raise refused("it has zeros in it: it is altered, or was never written to the disk")
            data.write(piece)
        return data.getvalue()


def is_checkpoint(place: Place) -> bool:
    """Whether `place` has a manifest that begins like ours. It may be damaged."""
    try:
        with _manifest_of(place, buffer_bytes=len(_BEGINNING)) as (file, _):
            return file.read(len(_BEGINNING)) == _BEGINNING
    except (CheckpointError, OSError):
        return False


@contextmanager
def _manifest_of(place: Place, *, buffer_bytes: int) -> Iterator[tuple[BinaryIO, int]]:
    """The open manifest at `place`, and its size in bytes."""
    file = (place / FILE_NAME).open_file()
    with io.BufferedReader(_Stream(file), buffer_bytes) as stream:
        yield stream, file.nbytes


class _Stream(io.RawIOBase):
    def __init__(self, file: OpenFile) -> None:
        self._file, self._position = file, 0

    def readable(self) -> bool:
        return True

    def readinto(self, memory: Any) -> int:
        count = self._file.read_into(memoryview(memory).cast("B"), self._position)
        self._position += count
        return count

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
