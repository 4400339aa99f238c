"""Holds a run's copies on this node: as long as a process holds them, nobody takes them for orphans.

A rank locks a copy only while it has the file mapped. Between a loss and the copies after it no rank has, and the rank that has written
a copy may be dead. So each process of a run also locks one file of the run, from before it looks for copies until it ends:

    copy-RUN-held
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from mpitrain.job.elastic.copies.files import made_own, open_own, prefix, remove_copies
from mpitrain.job.elastic.copies.folders import own_folder, own_folders, tidy

HELD = "held"
_CLEANING_S = 10.0  # the longest wait for a command that removes orphans of the run

_held: dict[Path, int] = {}  # the descriptors whose locks this process keeps, by the file


def hold(run: str) -> None:
    """Hold the run's copies until this process ends or calls `release`. Waits while a command removes orphans of the run.

    Without room for the file, or if that command stands still, only the locks of the copies themselves protect them.
    """
    try:
        path = file_of(run)
    except OSError:
        return
    while True:
        with suppress(OSError):
            if path in _held and os.path.samestat(os.fstat(_held[path]), os.lstat(path)):
                return
        if path in _held:
            os.close(_held.pop(path))  # another process has removed the file
        try:
            path, fd = made_own(path)
        except OSError:
            return
        if not _locked(fd):
            os.close(fd)
            return
        _held[path] = fd


def _locked(fd: int) -> bool:
    """Take a shared lock. Waits for a command that removes orphans; False if that command stands still."""
    end = time.monotonic() + _CLEANING_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(0.01)


def release(run: str) -> None:
    """Hold the run's copies no longer. They stay."""
    for path in [path for path in _held if path.name == _name(run)]:
        os.close(_held.pop(path))


def remove_all(run: str) -> None:
    """Remove all copies of a run from this node, and hold them no longer. For a run that has ended well."""
    remove_copies(run)
    for each in files_of_holders(run):
        with suppress(FileNotFoundError, PermissionError):
            each.unlink()
    release(run)
    tidy()


@contextmanager
def unheld(*files: Path, make: bool) -> Iterator[bool]:
    """Keep processes from beginning to hold a run's copies in the block. The value: whether no process holds them.

    `files`: what they lock, see `files_of_holders`. `make`: also those that are not there yet. Then they may be removed in the block.
    """
    there = [file for file in files if os.path.lexists(file)]
    with ExitStack() as stack:
        free = all(stack.enter_context(alone(file)) for file in there)
        if free and make:
            free = all(stack.enter_context(alone(file, os.O_CREAT)) for file in files if file not in there)
        yield free


def alone(path: Path, flags: int = 0) -> AbstractContextManager[bool]:
    """Hold an exclusive lock on a file in the block. The value: whether the lock could be taken at once. `flags`: more of `os.open`."""
    return locked(partial(open_own, path, os.O_RDWR | flags))


@contextmanager
def locked(opening: Callable[[], int]) -> Iterator[bool]:
    """Hold an exclusive lock on what `opening` opens, a file or folder, in the block. The value: whether it could be opened, and the
    lock be taken at once."""
    try:
        fd = opening()
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def file_of(run: str) -> Path:
    """The file that a process of a run locks. OSError if there is no folder for it."""
    return own_folder() / _name(run)


def files_of_holders(run: str) -> tuple[Path, ...]:
    """The files that processes of a run may have locked: another process may have got another folder, see folders.py."""
    return tuple(each / _name(run) for each in own_folders())


def is_unheld(run: str) -> bool:
    """Whether no process on this node holds the run's copies. Nothing is made to find that out."""
    with unheld(*files_of_holders(run), make=False) as free:
        return free


def _name(run: str) -> str:
    return f"{prefix(run)}{HELD}"
