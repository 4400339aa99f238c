"""Local paths, and safe access to a checkpoint's files: only regular files in its own folder, never links.

validation.py checks the contents of the files.
"""

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PosixPath

from ckpt.format.manifest import CheckpointError, File, OutOfReachError
from ckpt.storage.local import copy_file, patient, write_file
from collectives import files as safe


def open_folder(path: str | os.PathLike[str]) -> int:
    """A descriptor of a checkpoint's folder. Links may lead to the folder, but not to files in it. OSError if there is no folder."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)


def open_regular(path: str | os.PathLike[str], folder: int | None = None) -> int:
    """A descriptor to read a regular file; OSError or CheckpointError for a link, or for a pipe, without waiting for it.

    `folder`: a descriptor from `open_folder`, in which `path` is a plain name. So a reader stays in this folder if another program
    replaces it meanwhile.
    """
    try:
        return safe.open_regular(path, folder=folder)
    except safe.OddFileError as error:
        if error.errno == errno.ELOOP:  # what it leads to may be a checkpoint
            raise
        raise CheckpointError(f"{os.path.basename(path)} {error.what}") from None


def open_given(path: str | os.PathLike[str], most_bytes: int | None = None) -> int:
    """A descriptor to read a file that a user or a checkpoint names. Links are followed, as those of a cache of models.

    OSError if it is missing, or ValueError if it is no regular file, or has more than `most_bytes`. A pipe is not waited for, and a
    device is not opened.
    """
    with _given(path):
        return safe.open_regular(path, links=True, most_bytes=most_bytes)


def read_given(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """The bytes of such a file. ValueError also if it has more than `most_bytes`."""
    with _given(path):
        return safe.read_regular(path, most_bytes, links=True)


@contextmanager
def _given(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except safe.OddFileError as error:
        raise ValueError(f"{os.fspath(path)} {error.what}") from None


class LocalPath(PosixPath):
    """A path of this machine: a `pathlib.Path` with all methods of a `Url`, so that callers treat both alike."""

    __slots__ = ()

    def abspath(self) -> "LocalPath":
        """The absolute path, without "..", and with its links."""
        return LocalPath(os.path.abspath(self))

    def real(self) -> "LocalPath":
        """The absolute path without links. Two paths of one folder become equal."""
        return LocalPath(os.path.realpath(self))

    def is_there(self) -> bool:
        """Whether this name exists, also as a broken link."""
        return os.path.lexists(self)

    def is_write_protected(self) -> bool:
        """Whether this process may not add or remove files in this folder."""
        return not os.access(self, os.W_OK | os.X_OK, effective_ids=True)

    def names(self) -> list[str]:
        """The names in this folder."""
        return os.listdir(self)

    def folders(self) -> list[str]:
        """The names of the folders in this folder."""
        with os.scandir(self) as entries:
            return [entry.name for entry in entries if entry.is_dir()]

    def nbytes(self) -> int:
        """The bytes of the files in this folder."""
        with os.scandir(self) as entries:
            return sum(entry.stat(follow_symlinks=False).st_size for entry in entries)

    def open_file(self) -> "LocalFile":
        """Open this file to read it. OSError, or CheckpointError if it is no regular file."""
        return LocalFile(open_regular(self))

    def open_folder(self) -> "LocalFolder":
        """Open this folder to read the files in it. OSError if there is none."""
        return LocalFolder(open_folder(self))

    def check_files(self, files: tuple[File, ...]) -> None:
        """CheckpointError unless every file is a separate regular file in this folder, with the size in the manifest."""
        try:
            folder = open_folder(self)
        except OSError as error:
            raise OutOfReachError(f"the folder cannot be opened: {error.strerror}") from None
        try:
            _check_files(folder, files)
        finally:
            os.close(folder)

    def read(self) -> bytes:
        """All bytes of this file."""
        with open(open_regular(self), "rb") as opened:
            return opened.read()

    def write(self, data: bytes) -> None:
        """Make a new file with `data`, on the disk and not in the page cache, so that a reader reads the disk."""
        write_file(self, data, cached=False)

    def upload(self, source: Path) -> None:
        """Make a new file with the bytes of the file `source`, on the disk and not in the page cache."""
        try:
            patient(lambda: os.stat(self.parent))
        except FileNotFoundError as error:
            problem = f"not seen on {socket.gethostname()}: copies lie where all nodes see them"
            raise FileNotFoundError(error.errno, problem, str(self.parent)) from error
        with open(open_regular(source), "rb", buffering=0) as opened:
            copy_file(opened, source, self)


class LocalFolder:
    """A checkpoint's open folder. Any thread may open the files in it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def open(self, name: str) -> "LocalFile":
        """Open a file. OSError or CheckpointError if it cannot be read, or is no regular file."""
        return LocalFile(open_regular(name, self._fd))

    def close(self) -> None:
        os.close(self._fd)


class LocalFile:
    """An open file of one thread, to read at any position."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.nbytes = os.fstat(fd).st_size

    def read_into(self, memory: memoryview, position: int) -> int:
        """Fill `memory` with the bytes from `position` on. Returns their number, which is lower only at the end of the file."""
        done = 0
        while memory and (count := os.preadv(self._fd, [memory], position + done)):
            memory, done = memory[count:], done + count
        return done

    def close(self) -> None:
        os.close(self._fd)


def _check_files(folder: int, files: tuple[File, ...]) -> None:
    seen: dict[tuple[int, int], str] = {}
    for file in files:
        try:
            status = os.stat(file.name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError as error:
            raise CheckpointError(f"{file.name} is missing: {error.strerror}") from None
        except OSError as error:
            raise OutOfReachError(f"{file.name} cannot be looked at: {error.strerror}") from None
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{file.name} is no regular file: links and devices are not followed")
        if status.st_size != file.nbytes:
            raise CheckpointError(
                f"{file.name} has {status.st_size} bytes instead of {file.nbytes}: it is truncated or altered"
            )
        # Otherwise one file on the disk could stand for any number of files.
        other = seen.setdefault((status.st_dev, status.st_ino), file.name)
        if other != file.name:
            raise CheckpointError(f"{file.name} is the same file as {other}")
