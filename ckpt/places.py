"""Where checkpoints lie: in a local folder or in a remote one. What reading and copying ask of either is here.

A local folder is a `pathlib.Path`; its files are read by `preadv`, straight into the memory where the bytes belong, and links are
not followed. A remote one is a `Url` of anything that fsspec knows, S3 for example; its files are read by ranges. fsspec is
imported when the first URL comes.
"""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from ckpt.guard import open_regular
from ckpt.manifest import CheckpointError

_REQUEST_BYTES = 8 << 20  # of a remote file; longer ranges are several requests
_AHEAD_BYTES = 32 << 20  # the most that is fetched of it, and held, at a time


class Url(os.PathLike[str]):
    """A remote folder, or a name in one: what we use of a `pathlib.Path`, and the ways to read and write its files.

    Nothing is remembered between two calls. What goes wrong is an OSError that names the URL, whatever library it comes from.
    """

    __slots__ = ("_path", "_scheme")

    def __init__(self, text: str) -> None:
        self._scheme, _, path = text.partition("://")
        self._path = path.rstrip("/")

    def __str__(self) -> str:
        return f"{self._scheme}://{self._path}"

    def __fspath__(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return f"Url({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Url) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __truediv__(self, name: str) -> "Url":
        return Url(f"{self._scheme}://{self._path}/{name}")

    @property
    def name(self) -> str:
        return self._path.rpartition("/")[2]

    @property
    def parent(self) -> "Url":
        return Url(f"{self._scheme}://{self._path.rpartition('/')[0]}")

    def exists(self) -> bool:
        return self._kind() is not None

    def is_dir(self) -> bool:
        try:
            return bool(self.entries()) or self._kind() == "directory"
        except FileNotFoundError:
            return False

    def _kind(self) -> str | None:
        """None if there is nothing. Not fsspec's `exists`, for which what cannot be asked for does not exist."""
        try:
            with self._reaching() as (fs, path):
                return str(fs.info(path)["type"])
        except FileNotFoundError:
            return None

    def entries(self) -> dict[str, int | None]:
        """The names in this folder, with the sizes of files in bytes; None for folders. FileNotFoundError if there is none."""
        found = {}
        with self._reaching() as (fs, path):
            for entry in fs.ls(path, detail=True):
                name = entry["name"].rstrip("/")
                if name == path.rstrip("/"):  # some stores mark a folder by an empty file of its name
                    continue
                is_folder, size = entry["type"] == "directory", entry.get("size")
                if not is_folder and size is None:  # a web server's list of links
                    size = fs.size(name)
                found[name.rpartition("/")[2]] = None if is_folder else size
        return found

    def size(self) -> int:
        """Of a file, in bytes."""
        with self._reaching() as (fs, path):
            size = fs.size(path)
            if size is None:
                raise OSError("the server does not say how long it is")
            return int(size)

    def read(self, first: int | None = None, last: int | None = None) -> bytes:
        """Bytes `first` up to `last` of a file, or all of it; fewer if it ends before. Long ranges come in parts at the same time."""
        with self._reaching() as (fs, path):
            if first is None or last is None:
                return bytes(fs.cat_file(path))
            starts = list(range(first, last, _REQUEST_BYTES))
            ends = [*starts[1:], last]
            parts: list[bytes] = fs.cat_ranges([path] * len(starts), starts, ends, on_error="raise")
            if any(len(part) > end - start for part, start, end in zip(parts, starts, ends, strict=True)):
                raise OSError("the server sends more than was asked for: it knows no ranges")
            return parts[0] if len(parts) == 1 else b"".join(parts)

    def write(self, data: bytes) -> None:
        """A file with `data`, in place of what may be there. All at once, where the store can."""
        with self._reaching() as (fs, path):
            fs.pipe_file(path, data)

    def upload(self, source: Path) -> None:
        """A file with the bytes of the local file `source`."""
        with self._reaching() as (fs, path):
            fs.put_file(str(source), path)

    def unlink(self) -> None:
        """Remove a file; nothing happens if there is none."""
        with self._reaching() as (fs, path), suppress(FileNotFoundError):
            fs.rm_file(path)

    def make(self) -> None:
        """Make this folder and those above it where the store has such a thing; never what stands first, as a bucket."""
        if self.parent._path and not self.is_dir():
            self.parent.make()
            with self._reaching() as (fs, path):
                fs.mkdir(path, create_parents=False)

    def remove_folder(self, first: str, last: str) -> None:
        """Remove this folder with its files, of which those called `first` and `last` go so. Nothing happens if there is none."""
        try:
            names = self.entries()
        except FileNotFoundError:
            return
        for name in sorted(names, key=lambda name: (name == last, name != first)):
            (self / name).unlink()
        with (
            self._reaching() as (fs, path),
            suppress(OSError, NotImplementedError),
        ):  # gone with its last file, where folders are but parts of names
            fs.rmdir(path)

    @contextmanager
    def _reaching(self) -> Iterator[tuple[Any, str]]:
        """The file system and the path in it. A list that is kept would not show what other ranks have made since."""
        import fsspec

        try:
            yield fsspec.core.url_to_fs(str(self), use_listings_cache=False)
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self)) from error
        except OSError as error:
            if error.errno is not None and error.strerror:
                raise OSError(error.errno, error.strerror, str(self)) from error
            raise OSError(f"{self}: {error}") from error
        except (
            Exception
        ) as error:  # each library of a store has its own; ranks tell each other only those that all know
            raise OSError(f"{self}: {type(error).__name__}: {error}") from error


Place = Path | Url


def place_of(path: str | os.PathLike[str]) -> Place:
    """The place that a caller names: a `Url` if there is "://" in it, but "file://" is a local folder like any other.

    ValueError if fsspec, or the package for this kind of URL, is missing.
    """
    text = os.fspath(path)
    if isinstance(path, Path) or "://" not in text:
        return Path(path)
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


def absolute(path: str | os.PathLike[str]) -> Place:
    """As `place_of`; a local folder as an absolute path."""
    place = place_of(path)
    return place if isinstance(place, Url) else Path(os.path.abspath(place))


Paths = Sequence[str | os.PathLike[str]]


def all_places(paths: Paths | None) -> tuple[Place, ...]:
    """The places that a caller lists, absolute. TypeError if that is no list of folders and URLs."""
    if paths is None:
        return ()
    if not isinstance(paths, list | tuple) or not all(isinstance(path, str | os.PathLike) for path in paths):
        raise TypeError(f"copies is {paths!r}; expected a list of folders and URLs")
    return tuple(map(absolute, paths))


def names_in(place: Place) -> list[str]:
    """The names of what lies there."""
    return list(place.entries()) if isinstance(place, Url) else os.listdir(place)


def folders_in(place: Place) -> list[str]:
    """The names of the folders there."""
    if isinstance(place, Url):
        return [name for name, size in place.entries().items() if size is None]
    return [entry.name for entry in os.scandir(place) if entry.is_dir()]


def bytes_in(place: Place) -> int:
    """The bytes of the files there."""
    if isinstance(place, Url):
        return sum(size or 0 for size in place.entries().values())
    return sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(place))


def read_all(file: Place) -> bytes:
    """All of a file."""
    if isinstance(file, Url):
        return file.read()
    with open(open_regular(file), "rb") as opened:
        return opened.read()


class OpenFile(Protocol):
    """A file to read from, at any position; of one thread."""

    nbytes: int

    def read_into(self, memory: memoryview, position: int) -> int:
        """Fill `memory` with the bytes from `position` on; how many there were, which is fewer only where the file ends."""
        ...

    def close(self) -> None: ...


def open_file(file: Place) -> OpenFile:
    """OSError or CheckpointError if it cannot be read, or is no regular file."""
    return _RemoteFile(file) if isinstance(file, Url) else _LocalFile(file)


class _LocalFile:
    def __init__(self, path: Path) -> None:
        self._fd = open_regular(path)
        self.nbytes = os.fstat(self._fd).st_size

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


class _RemoteFile:
    """Read on from where the last read ended, it fetches ahead: twice as much each time, since each request has to wait."""

    def __init__(self, url: Url) -> None:
        self._url = url
        self.nbytes = url.size()
        self._held, self._first = memoryview(b""), 0  # bytes that are here already, and the position of the first

    def read_into(self, memory: memoryview, position: int) -> int:
        done = 0
        while done < len(memory):
            start = position + done - self._first
            if not 0 <= start < len(self._held) and not self._fetch(position + done, len(memory) - done):
                break
            piece = self._held[position + done - self._first :][: len(memory) - done]
            memory[done : done + len(piece)] = piece
            done += len(piece)
        return done

    def _fetch(self, position: int, wanted: int) -> bool:
        """Hold bytes from `position` on; whether there are any."""
        if position == self._first + len(self._held):
            wanted = max(wanted, 2 * len(self._held))
        last = min(position + min(wanted, _AHEAD_BYTES), self.nbytes)
        self._held, self._first = memoryview(self._url.read(position, last) if position < last else b""), position
        return len(self._held) > 0

    def close(self) -> None:
        self._held = memoryview(b"")


def check_sizes(url: Url, files: dict[str, int]) -> None:
    """CheckpointError unless each of `files` (name -> bytes) is there with its size."""
    found = url.entries()
    for name, nbytes in files.items():
        if name not in found:
            raise CheckpointError(f"{name} is missing")
        if found[name] != nbytes:
            raise CheckpointError(f"{name} has {found[name]} bytes instead of {nbytes}: it is truncated or altered")
