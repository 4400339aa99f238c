"""Files and folders of a shared file system: errors that name them, room for them, patience with them, and their way to the disk."""

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

_VISIBLE_S = 10.0

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
    """What `act` returns. What another rank has just made may take a while to appear on this node (NFS): it is tried again."""
    deadline = time.monotonic() + _VISIBLE_S
    while True:
        try:
            return act()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE) or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def write_file(path: Path, data: bytes) -> None:
    """A new file at `path` with `data`, flushed to disk."""
    with naming(path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
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
