"""Files and folders of a shared file system: errors that name them, room for them, patience with them, and their way to the disk."""

import errno
import io
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

_VISIBLE_S = 10.0
_BUFFER_BYTES = 4 << 20
_BEGIN_BYTES = 16 << 20
_SHARED_BYTES = 2 << 20  # neighbours may lie in one page of the page cache, which is hardly ever larger

T = TypeVar("T")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let every failure to write `path` be an OSError that names it; neither os.pwrite nor HDF5 does so reliably."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        if error.errno is not None and error.strerror:
            raise OSError(error.errno, error.strerror.splitlines()[0], str(path)) from error
        raise OSError(f"{path}: {error}") from error
    except RuntimeError as error:  # what h5py makes of an error it cannot name, when it closes a file on a full disk
        raise OSError(f"{path}: {error}") from error


def check_free(folder: Path, nbytes: int) -> None:
    """OSError unless the file system of `folder` has so many bytes left."""
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if free < nbytes:
        problem = f"{os.strerror(errno.ENOSPC)}: {nbytes:,} bytes are to be written, {free:,} are left"
        raise OSError(errno.ENOSPC, problem, str(folder))


def check_room(path: Path, nbytes: int) -> None:
    """OSError unless a file of `nbytes` can be made at `path`, in a folder that another rank has just made.

    HDF5 1.10 ends the process by a fault of its own when it cannot close a file on a full disk, so it is not let near one.
    """
    with naming(path):
        fd = patient(lambda: os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        try:
            os.write(fd, bytes(min(nbytes, 1 << 16)))  # a full disk, or a quota that is used up
            os.ftruncate(fd, nbytes)  # a limit on the size of files
        finally:
            os.close(fd)
            os.unlink(path)


def patient(act: Callable[[], T]) -> T:
    """The result of `act`, tried again while a file is missing: one of another rank may appear late on this node (NFS)."""
    deadline = time.monotonic() + _VISIBLE_S
    while True:
        try:
            return act()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE) or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def write_file(path: Path, data: bytes, *, durable: bool = True, cached: bool = True) -> None:
    """A new file at `path` with `data`.

    `durable`: flushed to the disk, so that the file is there after a power failure. `cached`: it may stay in memory.
    """
    with naming(path), _new_file(path, durable=durable, cached=cached) as fd:
        pwrite_all(fd, memoryview(data), 0)


def copy_file(opened: io.FileIO, source: Path, target: Path) -> None:
    """A new file at `target` with the bytes of the open file `source`, on the disk and no more in memory: a reader asks the disk.

    Read and written, not `copy_file_range`: that may give both names the same blocks of one disk.
    """
    with naming(target):
        check_room(target, os.fstat(opened.fileno()).st_size)
        with _new_file(target, durable=True, cached=False) as fd:
            buffer, position = memoryview(bytearray(_BUFFER_BYTES)), 0
            while True:
                with naming(source):
                    count = opened.readinto(buffer)
                if not count:
                    break
                pwrite_all(fd, buffer[:count], position)
                position += count


@contextmanager
def _new_file(path: Path, *, durable: bool, cached: bool) -> Iterator[int]:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        yield fd
        if durable:
            os.fsync(fd)
        if not cached:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def flush(path: Path) -> None:
    """Flush a file or a folder (its list of names) to disk."""
    with naming(path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def pwrite_all(fd: int, data: memoryview, position: int) -> None:
    """Write all of `data` from byte `position` of an open file on."""
    while data:
        written = os.pwrite(fd, data, position)
        data, position = data[written:], position + written


class Writeback:
    """Has the disk begin with what was written to an open file while more is on its way, instead of with all of it at `fsync`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._first, self._last = 0, 0

    def wrote(self, first: int, last: int) -> None:
        """Bytes `first:last` were handed to the system, often right behind those before them."""
        if not 0 <= first - self._last < _SHARED_BYTES:
            self._first = first
        self._last = last
        # What is on its way to the disk must not be written to: it would wait for it.
        end = last // _SHARED_BYTES * _SHARED_BYTES
        if end - self._first >= _BEGIN_BYTES:
            # "Not needed any more" is for Linux: begin to write, and keep what is not written yet.
            with suppress(OSError):
                os.posix_fadvise(self._fd, self._first, end - self._first, os.POSIX_FADV_DONTNEED)
            self._first = end


class Output:
    """A file for others, made under the name `temporary` beside its own, which `commit` gives it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = path.with_name(f".{path.name}.tmp")

    def flush(self) -> None:
        """Bring what was written to `temporary` to the disk."""
        flush(self.temporary)

    def commit(self) -> None:
        """Let it have its name, and replace what has it."""
        with naming(self.path):
            os.rename(self.temporary, self.path)
        flush(self.path.parent)

    def discard(self) -> None:
        """Remove it, unless it has its name. Never raises: there is an error on its way already."""
        with suppress(OSError):
            self.temporary.unlink(missing_ok=True)
