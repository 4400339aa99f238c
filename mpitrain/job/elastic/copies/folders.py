"""The folders of this user for copies, in the node's shared memory, where every user may make files.

    mpitrain-UID        of mode 0700
    mpitrain-UID.1      and so on, where another user has made a file or folder of the name before

Anybody can make a name before its user does, and only he can remove it again. So a folder counts only if it is this user's, no link,
and closed to all others. All processes try the names in the same order.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from collectives.environment import memory_folder
from collectives.transports.node.memory import OTHER_FOLDER

_NUM_NAMES = 8


def own_folder() -> Path:
    """The folder for new copies, which is made if there is none. PermissionError if other users have taken all names. OSError."""
    for path in _names():
        try:
            path.mkdir(0o700)
        except FileExistsError:
            pass
        except OSError as error:
            raise type(error)(f"{error}; {OTHER_FOLDER}") from None
        if _is_own(path):
            return path
    raise PermissionError(
        f"{memory_folder()}/mpitrain-{os.getuid()}, and {_NUM_NAMES - 1} more names for the copies of the state, are there; expected "
        "folders of this user with mode 0700: remove them, or choose another folder in memory by MPITRAIN_SHM_DIR"
    )


def own_folders(begin: str = "mpitrain", place: Path | None = None) -> list[Path]:
    """The folders that are there. The copies of a run may be in several: a name may have become free.

    Packs have such folders, too (mpitrain/tools/doctor/pack/start.sh). `begin`: of the names. `place`: if it is not node memory.
    """
    return [path for path in _names(begin, place) if _is_own(path)]


def files_in_own_folders(pattern: str) -> list[Path]:
    """The files of these names in the folders, in order. One that another process removes meanwhile, because it is empty, has none."""
    found: list[Path] = []
    for each in own_folders():
        with suppress(FileNotFoundError):
            found += each.glob(pattern)
    return sorted(found)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor of a folder of this user alone, which stays that folder whatever gets its name. OSError, also for another one."""
    fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not _is_of_this_user_alone(os.fstat(fd)):
            raise PermissionError(errno.EPERM, "not a folder of this user with mode 0700", path)
        yield fd
    finally:
        os.close(fd)


def tidy() -> None:
    """Remove the folders that are empty."""
    for path in own_folders():
        with suppress(OSError):
            path.rmdir()


def _names(begin: str = "mpitrain", place: Path | None = None) -> list[Path]:
    first = (place or memory_folder()) / f"{begin}-{os.getuid()}"
    return [first, *(first.with_name(f"{first.name}.{number}") for number in range(1, _NUM_NAMES))]


def _is_own(path: Path) -> bool:
    try:
        return _is_of_this_user_alone(path.lstat())
    except OSError:
        return False


def _is_of_this_user_alone(its: os.stat_result) -> bool:
    return stat.S_ISDIR(its.st_mode) and its.st_uid == os.getuid() and not its.st_mode & 0o077
