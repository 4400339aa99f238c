"""Finds the copies in node memory whose run is dead, and removes them.

A rank holds a shared lock (flock) on its copies while it lives, and the kernel drops the lock with the process. So a file that can be
locked exclusively belongs to no living rank. A relaunch may still want the copies of a run that died a short time ago.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from collectives.transports.node.memory import folder

KEPT_S = 3600.0
"""The time for which the copies of a dead run are kept for its next launch."""


def orphans(older_than_s: float = KEPT_S) -> list[Path]:
    """The copies of this user on this node that no living process locks, and that were last written `older_than_s` ago or more."""
    found = []
    for path in _old_copies(older_than_s):
        with _unlocked(path) as free:
            if free:
                found.append(path)
    return found


def remove_orphans(older_than_s: float = KEPT_S) -> list[Path]:
    """Remove the files that `orphans` lists, and return their paths. A file that another process removes first is left out."""
    removed = []
    for path in _old_copies(older_than_s):
        with _unlocked(path) as free, suppress(OSError):
            if free:  # still locked here, so that no relaunch takes it now
                path.unlink()
                removed.append(path)
    return removed


def _old_copies(older_than_s: float) -> list[Path]:
    now, user = time.time(), os.getuid()
    old = []
    for path in sorted(folder().glob(f"mpitrain-copy-{user}-*")):
        with suppress(OSError):  # removed in the meantime
            its = path.lstat()
            if its.st_uid == user and path.is_file() and not path.is_symlink() and now - its.st_mtime >= older_than_s:
                old.append(path)
    return old


@contextmanager
def _unlocked(path: Path) -> Iterator[bool]:
    """Hold an exclusive lock on the file in the block. The value: whether the lock could be taken at once."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
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
