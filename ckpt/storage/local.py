"""Files and folders of a shared file system: errors with their names, checks for room, retries, and writes that reach the disk."""

import errno
import io
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from ckpt.format.errors import naming
from collectives.files import open_new
from collectives.texts import shown

_VISIBLE_S = 10.0
_BUFFER_BYTES = 4 << 20
_BEGIN_BYTES = 16 << 20
_SHARED_BYTES = 2 << 20  # two ranges may share a page of the page cache, which is rarely larger than this

_CANNOT_FLUSH = {errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.ENOTSUP}
"""What file systems say that have no `fsync` of folders. Others, such as EIO and ENOSPC, tell of names that are lost."""

T = TypeVar("T")


def in_a_line(error: BaseException) -> str:
    """The first line of a library's message about a file, whose names may have characters that control a terminal."""
    line = next(iter(str(error).splitlines()), "") or type(error).__name__
    return shown(line[:500])


def check_free(folder: Path, nbytes: int) -> None:
    """OSError unless the file system of `folder` has `nbytes` bytes left."""
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if free < nbytes:
        problem = f"{os.strerror(errno.ENOSPC)}: {nbytes:,} bytes are to be written, {free:,} are left"
        raise OSError(errno.ENOSPC, problem, str(folder))


def check_room(path: Path, nbytes: int) -> None:
    """OSError unless a file of `nbytes` can be made at `path`, in a folder that another rank has just made.

    HDF5 1.10 crashes the process if it cannot close a file on a full disk, so this check comes before HDF5.
    """
    with naming(path):
        fd = patient(lambda: open_new(path, 0o600))
        try:
            os.write(fd, bytes(min(nbytes, 1 << 16)))  # fails on a full disk or a used-up quota
            os.ftruncate(fd, nbytes)  # fails at a limit on the size of files
        finally:
            os.close(fd)
            os.unlink(path)


def patient(act: Callable[[], T]) -> T:
    """The result of `act`, tried again while a file is missing, because another rank's file may appear late on this node (NFS)."""
    deadline = time.monotonic() + _VISIBLE_S
    while True:
        try:
            return act()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE) or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def write_file(path: Path, data: bytes, *, durable: bool = True, cached: bool = True) -> None:
    """Make a new file at `path` with `data`.

    `durable`: flush it to the disk, so that the file exists after a power failure. `cached`: it may stay in the page cache.
    """
    with naming(path), _new_file(path, durable=durable, cached=cached) as fd:
        pwrite_all(fd, memoryview(data), 0)


def copy_file(opened: io.FileIO, source: Path, target: Path) -> None:
    """Make a new file at `target` with the bytes of the open file `source`, on the disk and not in the page cache.

    The bytes are read and written, because `copy_file_range` may share the same disk blocks between both files.
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
    fd = open_new(path)
    try:
        yield fd
        if durable:
            os.fsync(fd)
        if not cached:
            with suppress(OSError):  # of a file system without a page cache
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def flush(path: Path) -> None:
    """Flush a file or a folder (its list of names) to disk.

    A file system that cannot flush folders (CIFS, some of FUSE) decides by itself when names reach the disk.
    """
    with naming(path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in _CANNOT_FLUSH or not stat.S_ISDIR(os.fstat(fd).st_mode):
                raise
        finally:
            os.close(fd)


def pwrite_all(fd: int, data: memoryview, position: int) -> None:
    """Write all of `data` from byte `position` of an open file on."""
    while data:
        written = os.pwrite(fd, data, position)
        data, position = data[written:], position + written


class Writeback:
    """Lets the disk begin to write the bytes of an open file while more bytes come, instead of all bytes at `fsync`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._first, self._last = 0, 0

    def wrote(self, first: int, last: int) -> None:
        """Note that bytes `first:last` are in the page cache; often they follow the previous ones."""
        if not 0 <= first - self._last < _SHARED_BYTES:
            self._first = first
        self._last = last
        # A write to pages on their way to the disk would wait for them.
        end = last // _SHARED_BYTES * _SHARED_BYTES
        if end - self._first >= _BEGIN_BYTES:
            # On Linux DONTNEED begins to write the pages, and keeps those that are not written yet.
            with suppress(OSError):
                os.posix_fadvise(self._fd, self._first, end - self._first, os.POSIX_FADV_DONTNEED)
            self._first = end


class Output:
    """A file for other programs. It is made with the name `temporary` beside `path`, and gets its own name by `commit`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = path.with_name(f".{path.name}.tmp")

    def make(self) -> int:
        """Make the file `temporary`, for which what was left there is removed; returns its descriptor."""
        with naming(self.path):
            self.temporary.unlink(missing_ok=True)
            return open_new(self.temporary)

    def flush(self) -> None:
        """Flush the file `temporary` to the disk."""
        flush(self.temporary)

    def commit(self) -> None:
        """Give the file its name, and replace an old file."""
        with naming(self.path):
            os.rename(self.temporary, self.path)
        flush(self.path.parent)

    def discard(self) -> None:
        """Remove the file, unless it has got its name. Never raises, because it runs after another error."""
        with suppress(OSError):
            self.temporary.unlink(missing_ok=True)
