"""Where checkpoints lie: in a local folder or in a remote one. What reading and copying ask of either is here.

A local folder is a `pathlib.Path`: access.py says how its files are opened; they are read by `preadv`, straight into the memory where
the bytes belong. A remote one is a `Url`: remote.py. Of either only so much is believed as validation.py has checked.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ckpt.format.manifest import FILE_NAME, CheckpointError, File
from ckpt.format.validation import Header
from ckpt.storage import access
from ckpt.storage.remote import RemoteFile, RemoteFolder, Url, check_sizes, open_stream

Place = Path | Url


def place_of(path: str | os.PathLike[str]) -> Place:
    """The place that a caller names: a `Url` if there is "://" in it, but "file://" is a local folder like any other.

    A "~" at the beginning is the user's home, as in a shell. TypeError for what is no path, bytes among it. ValueError if there is no
    home, or if fsspec, or the package for this kind of URL, is missing.
    """
    text = text_of(path)
    if isinstance(path, Path) or "://" not in text:
        return Path(_at_home(text) if text.startswith("~") else path)
    scheme, _, rest = text.partition("://")
    if scheme == "file":
        return Path(rest)
    try:
        import fsspec

        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        raise ValueError(
            f"{text} cannot be reached: {error}; pip install 'mpitrain[remote]' brings what S3 needs"
        ) from error
    except ValueError as error:
        raise ValueError(f"{text} cannot be reached: {error}") from error
    return Url(text)


def text_of(path: str | os.PathLike[str]) -> str:
    """A path as a text. TypeError for what is none."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str):
        hint = ", which os.fsdecode makes of bytes" if isinstance(text, bytes) else ""
        raise TypeError(f"{path!r:.200} is no path; expected a str{hint}, or a pathlib.Path")
    return text


def _at_home(text: str) -> str:
    expanded = os.path.expanduser(text)  # "~name" of no user is a name like any other
    if expanded.startswith("~/") or expanded == "~":
        raise ValueError(f"{text!r} cannot be found: this user has no home; expected a path without '~'")
    return expanded


def absolute(path: str | os.PathLike[str]) -> Place:
    """As `place_of`; a local folder as an absolute path."""
    place = place_of(path)
    return place if isinstance(place, Url) else Path(os.path.abspath(place))


def local_path(path: str | os.PathLike[str], name: str, expected: str) -> Path:
    """An absolute local path. ValueError for a URL, which says what was `expected` as the argument of that `name`."""
    place = absolute(path)
    if isinstance(place, Url):
        raise ValueError(f"{name} is {place}; expected {expected}")
    return place


Paths = Sequence[str | os.PathLike[str]]


def all_places(paths: Paths | None) -> tuple[Place, ...]:
    """The places that a caller lists, absolute. TypeError if that is no list of folders and URLs."""
    if paths is None:
        return ()
    if not isinstance(paths, list | tuple) or not all(isinstance(path, str | os.PathLike) for path in paths):
        raise TypeError(f"copies is {paths!r}; expected a list of folders and URLs")
    return tuple(map(absolute, paths))


def copies_of(path: str | os.PathLike[str] | None, copies: Paths | None) -> list[Place]:
    """Where the checkpoint `path` may be, each place once: there, and under its name in `copies`. CheckpointError for None."""
    if path is None:
        raise CheckpointError(
            "there is no checkpoint: the path is None, as ckpt.latest(folder) has it where none is complete"
        )
    first = absolute(path)
    return list(dict.fromkeys([first, *(place / first.name for place in all_places(copies))]))


def is_there(place: Place) -> bool:
    """Whether anything of that name is there, a link that leads nowhere included; True also if a store does not say."""
    if not isinstance(place, Url):
        return os.path.lexists(place)
    try:
        return place.exists()
    except OSError:
        return True


def names_in(place: Place) -> list[str]:
    """The names of what lies there."""
    return list(place.entries()) if isinstance(place, Url) else os.listdir(place)


def folders_in(place: Place) -> list[str]:
    """The names of the folders there."""
    if isinstance(place, Url):
        return [name for name, size in place.entries().items() if size is None]
    with os.scandir(place) as entries:
        return [entry.name for entry in entries if entry.is_dir()]


def bytes_in(place: Place) -> int:
    """The bytes of the files there."""
    if isinstance(place, Url):
        return sum(size or 0 for size in place.entries().values())
    with os.scandir(place) as entries:
        return sum(entry.stat(follow_symlinks=False).st_size for entry in entries)


def read_all(file: Place) -> bytes:
    """All of a file."""
    if isinstance(file, Url):
        return file.read()
    with open(access.open_regular(file), "rb") as opened:
        return opened.read()


def read_header(place: Place) -> tuple[Header, bytes]:
    """The header of the checkpoint at `place`, and its line; CheckpointError, OSError."""
    if not isinstance(place, Url):
        return access.read_header(place)
    with open_stream(RemoteFile(place / FILE_NAME), buffer_bytes=64 << 10) as file:
        return access.header_in(file)


def read_bytes(place: Place) -> bytes:
    """The manifest of the checkpoint at `place`, to be decoded. CheckpointError, OSError."""
    if not isinstance(place, Url):
        return access.read_bytes(place)
    remote = RemoteFile(place / FILE_NAME)
    with open_stream(remote, buffer_bytes=1 << 20) as file:
        return access.manifest_in(file, remote.nbytes)


def check_files(place: Place, files: tuple[File, ...]) -> None:
    """CheckpointError unless every file is there, in the size that the manifest names; of local ones see access.py."""
    if isinstance(place, Url):
        check_sizes(place, files)
    else:
        access.check_files(place, files)


class OpenFile(Protocol):
    """A file to read from, at any position; of one thread."""

    nbytes: int

    def read_into(self, memory: memoryview, position: int) -> int:
        """Fill `memory` with the bytes from `position` on; how many there were, which is fewer only where the file ends."""
        ...

    def close(self) -> None: ...


class Folder(Protocol):
    """A checkpoint's folder, to open the files in it. Any thread may."""

    def open(self, name: str) -> OpenFile:
        """OSError or CheckpointError if it cannot be read, or is no regular file."""
        ...

    def close(self) -> None: ...


def open_place(place: Place) -> Folder:
    """OSError if it is no folder."""
    return RemoteFolder(place) if isinstance(place, Url) else _LocalFolder(place)


class _LocalFolder:
    def __init__(self, path: Path) -> None:
        self._fd = access.open_folder(path)

    def open(self, name: str) -> "_LocalFile":
        return _LocalFile(access.open_regular(name, self._fd))

    def close(self) -> None:
        os.close(self._fd)


class _LocalFile:
    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.nbytes = os.fstat(fd).st_size

    def read_into(self, memory: memoryview, position: int) -> int:
        done = 0
        while done < len(memory):
            count = os.preadv(self._fd, [memory[done:]], position + done)
            if not count:
                break
            done += count
        return done

    def close(self) -> None:
        os.close(self._fd)
