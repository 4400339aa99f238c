"""Remote folders of any kind that fsspec knows, such as S3. Files are read by ranges. fsspec is imported when a URL is used."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ckpt.format.manifest import CheckpointError, File
from ckpt.storage import s3
from ckpt.storage.file_info import FileInfo, info_of, known_info, version_of
from collectives.texts import without_secrets

_REQUEST_BYTES = 8 << 20  # the most bytes of one request; longer ranges are several requests
_AHEAD_BYTES = 32 << 20  # the most bytes of a file that are fetched and held at a time


class Url(os.PathLike[str]):
    """A remote folder, or a name in one, with the methods of a `LocalPath` that we use.

    Results are not cached between two calls. Every error, from any library, becomes an OSError that names the URL, without secrets.
    """

    __slots__ = ("_path", "_scheme")

    def __init__(self, text: str) -> None:
        self._scheme, _, path = text.partition("://")
        self._path = path.rstrip("/")

    def __str__(self) -> str:
        """The address without user, password, key and signature, for messages. `os.fspath` gives the whole one."""
        return without_secrets(os.fspath(self))

    def __fspath__(self) -> str:
        return f"{self._scheme}://{self._path}"

    def __repr__(self) -> str:
        return f"Url({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Url) and os.fspath(self) == os.fspath(other)

    def __hash__(self) -> int:
        return hash(os.fspath(self))

    def __truediv__(self, name: str) -> "Url":
        return Url(f"{self._scheme}://{self._path}/{name}")

    @property
    def name(self) -> str:
        return self._path.rpartition("/")[2]

    @property
    def parent(self) -> "Url":
        return Url(f"{self._scheme}://{self._path.rpartition('/')[0]}")

    @property
    def parents(self) -> "list[Url]":
        """The folders around it, inner ones first, up to the first part, such as a bucket."""
        parent = self.parent
        return [parent, *parent.parents] if parent._path else []

    def abspath(self) -> "Url":
        return self

    def real(self) -> "Url":
        return self

    def exists(self) -> bool:
        return self._kind() is not None

    def is_there(self) -> bool:
        """Like `exists`, but also True if the store does not answer."""
        try:
            return self.exists()
        except OSError:
            return True

    def is_write_protected(self) -> bool:
        """Always False: a write to the store reports it."""
        return False

    def is_dir(self) -> bool:
        try:
            return bool(self.entries()) or self._kind() == "directory"
        except FileNotFoundError:
            return False

    def _kind(self) -> str | None:
        """None if the name does not exist. fsspec's `exists` is not used, because it returns False after errors."""
        try:
            with self._reaching() as (fs, path):
                return str(fs.info(path)["type"])
        except FileNotFoundError:
            return None

    def entries(self) -> dict[str, int | None]:
        """The names in this folder, with the sizes of files in bytes; None for folders. FileNotFoundError if there is none."""
        return {name: None if its is None else its.size for name, its in self.infos().items()}

    def infos(self) -> dict[str, FileInfo | None]:
        """The names in this folder, with what the store says of files; None for folders. Raises as `entries` does."""
        found = {}
        with self._reaching() as (fs, path):
            for entry in fs.ls(path, detail=True):
                name = entry["name"].rstrip("/")
                if name == path.rstrip("/"):  # some stores mark a folder by an empty file with its name
                    continue
                found[name.rpartition("/")[2]] = None if entry["type"] == "directory" else info_of(fs, name, entry)
        return found

    def files(self) -> "dict[Url, FileInfo]":
        """The files of which the names match this one, a pattern with *, ** or ?."""
        with self._reaching() as (fs, path):
            found = fs.glob(path, detail=True)
            return {
                Url(fs.unstrip_protocol(name)): known_info(fs, name, entry)
                for name, entry in found.items()
                if entry["type"] == "file"
            }

    def names(self) -> list[str]:
        return list(self.entries())

    def folders(self) -> list[str]:
        return [name for name, size in self.entries().items() if size is None]

    def nbytes(self) -> int:
        return sum(size or 0 for size in self.entries().values())

    def open_file(self) -> "RemoteFile":
        return RemoteFile(self)

    def open_folder(self) -> "RemoteFolder":
        return RemoteFolder(self)

    def check_files(self, files: tuple[File, ...]) -> None:
        """CheckpointError unless each of `files` is in this folder with its size."""
        found = self.entries()
        for file in files:
            if file.name not in found:
                raise CheckpointError(f"{file.name} is missing")
            if found[file.name] != file.nbytes:
                raise CheckpointError(
                    f"{file.name} has {found[file.name]} bytes instead of {file.nbytes}: it is truncated or altered"
                )

    def size(self) -> int:
        """The size of a file, in bytes."""
        return self.info().size

    def info(self) -> FileInfo:
        """What the store says of a file. One request."""
        with self._reaching() as (fs, path):
            return known_info(fs, path, fs.info(path))

    def read(self, first: int | None = None, last: int | None = None) -> bytes:
        """Bytes `first:last` of a file, or the whole file; fewer if it ends before. Long ranges are fetched in concurrent parts."""
        with self._reaching() as (fs, path):
            if first is None or last is None:
                return bytes(fs.cat_file(path))
            starts = list(range(first, last, _REQUEST_BYTES))
            ends = [*starts[1:], last]
            parts: list[bytes] = fs.cat_ranges([path] * len(starts), starts, ends, on_error="raise")
            if any(len(part) > end - start for part, start, end in zip(parts, starts, ends, strict=True)):
                raise OSError("the server sends more bytes than requested: it does not support ranges")
            return parts[0] if len(parts) == 1 else b"".join(parts)

    def write(self, data: bytes) -> None:
        """Write a file with `data`, and replace an old file, in one step if the store can."""
        with self._reaching() as (fs, path):
            fs.pipe_file(path, data)

    def download(self, target: Path, *, asks_version: bool = False) -> str:
        """Write the bytes of this file to the local file `target`, by one request; s3fs takes more for objects beyond 50 MB.

        Returns the version of these bytes, as in a FileInfo, which may take one more request; "" unless `asks_version`. Errors come
        soon, so that the caller can try again.
        """
        with self._named_errors():
            if self._scheme == "s3" and (etag := s3.download(self._path, target)) is not None:
                return version_of({"ETag": etag})
        with self._reaching(one_try=True) as (fs, path):
            fs.get_file(path, str(target))
            return version_of(fs.info(path)) if asks_version else ""

    def upload(self, source: Path) -> None:
        """Write a file with the bytes of the local file `source`."""
        with self._reaching() as (fs, path):
            fs.put_file(str(source), path)

    def unlink(self) -> None:
        """Remove a file; nothing happens if there is none."""
        with self._reaching() as (fs, path), suppress(FileNotFoundError):
            fs.rm_file(path)

    def make(self) -> "list[Url]":
        """Make this folder and its parents, if the store has folders; but never the first part, such as a bucket.

        Returns the folders that did not exist, this one first.
        """
        if not self.parent._path or self.is_dir():
            return []
        made = self.parent.make()
        with self._reaching() as (fs, path):
            fs.mkdir(path, create_parents=False)
        return [self, *made]

    def remove_folder(self, first: str, last: str) -> None:
        """Remove this folder, if it exists, with its files: the file `first` first, the file `last` last."""
        try:
            names = self.entries()
        except FileNotFoundError:
            return
        for name in sorted(names, key=lambda name: (name == last, name != first)):
            (self / name).unlink()
        self.remove_empty()

    def remove_empty(self) -> None:
        """Remove this folder if it is empty. In stores where folders are only parts of names, it ends with its last file."""
        with suppress(OSError, NotImplementedError), self._reaching() as (fs, path):
            fs.rmdir(path)

    @contextmanager
    def _reaching(self, *, one_try: bool = False) -> Iterator[tuple[Any, str]]:
        """The file system and the path in it, without cached listings, which would lack new files of other ranks."""
        import fsspec

        with self._named_errors():
            settings = _one_try(self._scheme) if one_try else {}
            yield fsspec.core.url_to_fs(os.fspath(self), use_listings_cache=False, **settings)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """A block of which all errors become OSErrors that name the URL."""
        try:
            yield
        except Exception as error:
            # Each library has its own errors, but ranks can only send errors that all ranks know. Theirs have the whole address.
            cause = error if str(self) == os.fspath(self) else None
            raise self._named(error) from cause

    def _named(self, error: Exception) -> OSError:
        """The error of a library as an OSError."""
        text = without_secrets(str(error), of=os.fspath(self))
        if isinstance(error, FileNotFoundError):
            return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        if isinstance(error, PermissionError):  # s3fs' have no number
            return PermissionError(errno.EACCES, without_secrets(error.strerror or text, of=os.fspath(self)), str(self))
        if isinstance(error, OSError):
            if error.errno is not None and error.strerror:
                return OSError(error.errno, without_secrets(error.strerror, of=os.fspath(self)), str(self))
            return OSError(f"{self}: {text}")
        if getattr(error, "status", None) in (401, 403):  # of HTTP
            return PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        return OSError(f"{self}: {type(error).__name__}: {text}")


def _one_try(scheme: str) -> dict[str, Any]:
    """Settings of fsspec with which a request ends soon if the server does not answer, and lasts as long as bytes come.

    They join what the user has set for the scheme (`fsspec.config`): arguments would replace it.
    """
    import fsspec

    if scheme in ("s3", "s3a"):  # botocore tries 5 times within each of the 5 times of s3fs: 7 minutes
        name, settings = "config_kwargs", dict[str, Any](retries={"max_attempts": 0})
    elif scheme in ("http", "https"):  # aiohttp ends a request after 5 minutes
        from aiohttp import ClientTimeout

        name, settings = "client_kwargs", {"timeout": ClientTimeout(total=None, sock_connect=10.0, sock_read=30.0)}
    else:
        return {}
    return {name: settings | fsspec.config.conf.get(scheme, {}).get(name, {})}


class RemoteFolder:
    """The counterpart of `LocalFolder`."""

    def __init__(self, url: Url) -> None:
        self._url = url

    def open(self, name: str) -> "RemoteFile":
        return RemoteFile(self._url / name)

    def close(self) -> None:
        pass


class RemoteFile:
    """The counterpart of `LocalFile`. Consecutive reads fetch twice as much each time, because each request has a delay."""

    def __init__(self, url: Url) -> None:
        self._url = url
        self.nbytes = url.size()
        self._held, self._first = memoryview(b""), 0  # fetched bytes, and the position of the first one

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
        """Fetch and hold bytes from `position` on. Returns whether there are any."""
        if position == self._first + len(self._held):
            wanted = max(wanted, 2 * len(self._held))
        last = min(position + min(wanted, _AHEAD_BYTES), self.nbytes)
        self._held, self._first = memoryview(self._url.read(position, last) if position < last else b""), position
        return len(self._held) > 0

    def close(self) -> None:
        self._held = memoryview(b"")
