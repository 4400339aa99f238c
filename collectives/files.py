"""Opening files that others may have made, so that none can hurt the process that opens it, and making new ones that nobody has made.

Standard library only: processes on hosts without packages load this file by its path.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from io import FileIO
from pathlib import Path
from uuid import uuid4
from zlib import crc32

_KINDS = {
    stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_PARTIAL = ".tmp"
_PIECE_BYTES = 1 << 20
_MOST_LINKS = 40  # on the way to a file, as of the system
_swept: set[Path] = set()
_SAFE = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY  # if it became another one after the look at it


class OddFileError(OSError):
    """What is there is no regular file, or too long: another try will not help.

    It is made as an OSError is: of a number, a text such as "it is a pipe; expected a regular file", and the path; or of one text.
    """

    @property
    def what(self) -> str:
        """Of the file: "is a pipe; expected a regular file"."""
        return (self.strerror or super().__str__()).removeprefix("it ")

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}" if self.filename is not None else super().__str__()


def open_regular(
    path: str | os.PathLike[str],
    flags: int = os.O_RDONLY,
    mode: int = 0o666,
    *,
    folder: int | None = None,
    links: bool = False,
    most_bytes: int | None = None,
) -> int:
    """A descriptor of a regular file. A pipe is not waited for, and a device is not opened.

    Args:
        flags: and `mode`, of `os.open`. O_CREAT makes the file if there is none.
        folder: a descriptor of a folder, in which `path` is.
        links: follow a link at the end of `path`.
        most_bytes: of the file.

    Raises:
        OddFileError: it is something else, or longer.
        OSError: it is missing, or cannot be opened.
    """
    try:
        _check(path, os.stat(path, dir_fd=folder, follow_symlinks=links), most_bytes)
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    fd = os.open(path, flags | _SAFE | (0 if links else os.O_NOFOLLOW), mode, dir_fd=folder)
    try:
        _check(path, os.fstat(fd), most_bytes)
    except OddFileError:
        os.close(fd)
        raise
    return fd


def _check(path: str | os.PathLike[str], found: os.stat_result, most_bytes: int | None) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = stat.S_IFMT(found.st_mode)
        what, number = _KINDS.get(kind, "something else"), errno.ELOOP if kind == stat.S_IFLNK else errno.EINVAL
        raise OddFileError(number, f"it is {what}; expected a regular file", os.fspath(path))
    if most_bytes is not None and found.st_size > most_bytes:
        said = f"it has {found.st_size:,} bytes; expected at most {most_bytes:,}"
        raise OddFileError(errno.EFBIG, said, os.fspath(path))


def read_regular(path: str | os.PathLike[str], most_bytes: int, *, links: bool = False) -> bytes:
    """The bytes of a regular file, also of one that grows or shrinks meanwhile. OSError: see `open_regular`."""
    with open(open_regular(path, links=links, most_bytes=most_bytes), "rb", buffering=0) as file:
        return _all_of(file, path, most_bytes)


def read_named(path: str | os.PathLike[str], most_bytes: int) -> tuple[bytes, str]:
    """The bytes of a file that the words of this process name, and who else could have written it: see `other_writer`.

    It is a regular file, perhaps behind links, or a pipe that the shell has made for this process, as for `--config <(command)`, and
    that lies in no folder. A pipe that lies in one is none: its other end may be anybody's, or nobody's for ever.

    OSError: see `open_regular`.
    """
    if stat.S_ISFIFO(os.stat(path).st_mode) and not os.path.lexists(os.path.realpath(path)):
        fd = os.open(path, os.O_RDONLY | _SAFE)
        os.set_blocking(fd, True)
    else:
        fd = open_regular(path, links=True, most_bytes=most_bytes)
    with open(fd, "rb", buffering=0) as file:
        return _all_of(file, path, most_bytes), other_writer(path, os.fstat(fd))


def _all_of(file: FileIO, path: str | os.PathLike[str], most_bytes: int) -> bytes:
    data = bytearray()
    while len(data) <= most_bytes and (piece := file.read(min(_PIECE_BYTES, most_bytes + 1 - len(data)))):
        data += piece
    if len(data) > most_bytes:
        raise OddFileError(errno.EFBIG, f"it has more than {most_bytes:,} bytes", os.fspath(path))
    return bytes(data)


def other_writer(path: str | os.PathLike[str], found: os.stat_result | None = None) -> str:
    """Who else than this user and root could have written the file or folder, such as "it belongs to user 7"; "" if nobody could.

    As with ssh, all folders above count too: see `other_replacer`.

    OSError: it cannot be looked at.

    `found`: of the file, if it is open. A pipe, as the shell makes for `--config <(command)`, lies in no folder: none is looked at.
    """
    its = os.stat(path) if found is None else found
    trusted = {os.geteuid(), 0}
    if its.st_uid not in trusted:
        return f"it belongs to user {its.st_uid}"
    if its.st_mode & 0o022:
        return "others can write to it"
    replacer = other_replacer(path) if stat.S_ISREG(its.st_mode) or stat.S_ISDIR(its.st_mode) else ""
    return replacer and f"others can replace it: {replacer}"


def other_replacer(path: str | os.PathLike[str]) -> str:
    """By what others than this user and root could put something else at a path, such as "/a belongs to user 7, mode 755"; "" if nobody
    could. There need be nothing at the path.

    Who can write to a folder above can replace what is in it, unless it is sticky, as /tmp is. So do links on
    the way count, with the folders above each: who makes a link chooses the file.

    OSError: a folder above cannot be looked at.
    """
    # In a container without root, all users but this one have the number of the owner of "/", also root, to whom the system's folders
    # belong. A stranger's folder cannot be told from them. A file in it is told by its own owner.
    trusted = {os.geteuid(), 0, os.stat("/").st_uid}
    for folder, link in _way(path):
        above = os.lstat(folder)
        is_open = above.st_mode & 0o022
        if above.st_uid not in trusted or (is_open and not above.st_mode & stat.S_ISVTX):
            return f"{folder} belongs to user {above.st_uid}, mode {stat.S_IMODE(above.st_mode):o}"
        owner = os.lstat(link).st_uid if link else os.geteuid()
        if owner not in ({os.geteuid(), 0} if is_open else trusted):  # links of the system lie in its own folders
            return f"the link {link} belongs to user {owner}"
    return ""


def _way(path: str | os.PathLike[str]) -> Iterator[tuple[str, str]]:
    """The folders in which the system looks for the names of a path, each with the link that it finds there, or ""."""
    at, num_links = "/", 0
    names = os.path.join(os.getcwd(), os.fspath(path)).split("/")[::-1]
    while names:
        name = names.pop()
        if name in ("", ".", ".."):
            at = os.path.dirname(at) if name == ".." else at
            continue
        here = os.path.join(at, name)
        try:
            target = os.readlink(here)
        except OSError:  # no link
            yield at, ""
            at = here
            continue
        yield at, here
        num_links += 1
        if num_links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))
        names += target.split("/")[::-1]
        at = "/" if target.startswith("/") else at


def open_new(path: str | os.PathLike[str], mode: int = 0o666) -> int:
    """A descriptor of a new file, to read and write. FileExistsError if there is anything, also a link to nothing. OSError."""
    return os.open(path, _NEW, mode)


def partial_of(path: Path, *, sweeps: bool = True) -> Path:
    """The name of this process beside `path` for a file that gets the name `path` when it is whole.

    The first call for a path removes the partial files of processes that have ended, as far as this is certain: those of other hosts,
    of other containers and from before a restart stay, because their process may still write. So does a file of another path.

    `sweeps`: do so. It lists the folder: not on each rank of a job at once.
    """
    begin = f"{'' if path.name.startswith('.') else '.'}{path.name[:180]}.{_place()}-"
    if sweeps and path not in _swept:
        _swept.add(path)
        with suppress(OSError):
            for name in os.listdir(path.parent):
                pid = name.removeprefix(begin).removesuffix(_PARTIAL)
                if name == f"{begin}{pid}{_PARTIAL}" and pid.isdecimal() and _has_ended(int(pid)):
                    path.with_name(name).unlink()
    partial = path.with_name(f"{begin}{os.getpid()}{_PARTIAL}")
    partial.unlink(missing_ok=True)
    return partial


@lru_cache(1)
def _place() -> str:
    """What the numbers of processes belong to: this start of this host, and this container of it."""
    try:
        boot, container = Path("/proc/sys/kernel/random/boot_id").read_text(), os.stat("/proc/self/ns/pid").st_ino
        return f"{crc32(f'{boot} {container}'.encode()):08x}"
    except OSError:  # no process is known to have ended
        return uuid4().hex


def _has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # of another user
        return False
    return False


def write_new(path: Path, data: bytes) -> None:
    """Write a new file in place of what is there, never through a link. OSError."""
    path.unlink(missing_ok=True)
    with open(open_new(path), "wb") as file:
        file.write(data)
