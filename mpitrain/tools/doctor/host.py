"""Measures the folders of one host: node memory, the run's disk, temporary files. No function here judges.

Facts are NamedTuples of plain values, because they travel between ranks and appear in the JSON report.
"""

import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir
from typing import NamedTuple
from uuid import uuid4

import xxhash

from collectives.cgroup import groups_of, smallest_limit
from collectives.environment import memory_folder
from collectives.files import open_new
from mpitrain.job.elastic.copies.orphans import orphans, remove_orphans
from mpitrain.job.record.machine.memory import node_bytes
from mpitrain.tools.doctor import remains


class Memory(NamedTuple):
    """The folder of the node's shared memory. `failure`: why a file of it cannot be used, empty if it can."""

    folder: str
    kind: str
    total: int
    free: int
    failure: str


class Most(NamedTuple):
    """The bytes that the processes of a host may have. `of_cgroup`: by the limit of a cgroup, which is less than the host has."""

    nbytes: int
    of_cgroup: bool


def most_memory() -> Most:
    limit, nbytes = smallest_limit(groups_of()), node_bytes()
    return Most(nbytes, limit == nbytes)


def node_memory() -> Memory:
    folder = memory_folder()
    total = free = 0
    failure = ""
    try:
        room = os.statvfs(folder)
        total, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
        path = folder / f"mpitrain-{os.getpid()}-{uuid4().hex}"
        fd = open_new(path, 0o600)
        try:
            os.posix_fallocate(fd, 0, 1 << 20)
        finally:
            os.close(fd)
            path.unlink()
    except OSError as error:
        failure = error.strerror or str(error)
    return Memory(str(folder), _file_system(folder), total, free, failure)


def _file_system(path: Path) -> str:
    """The kind of the file system of a path, such as tmpfs, by the longest mount point above it."""
    best, kind = "", "unknown"
    with suppress(OSError):
        whole = os.path.realpath(path)
        for line in Path("/proc/mounts").read_text().splitlines():
            _, point, its, *_ = line.split()
            point = point.replace("\\040", " ")
            if (whole == point or whole.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
                best, kind = point, its
    return kind


class Leftovers(NamedTuple):
    """Files of dead jobs in node memory, and their bytes. `removed`: copies that this call has removed.

    `others`: paths, with "/" behind folders. `sessions`: the folders of mpiruns that were killed, as it seems from here. `packs`: see
    `unused_packs`.
    """

    copies: list[str]
    copy_bytes: int
    removed: list[str]
    others: list[str]
    other_bytes: int
    older_than_s: float
    sessions: list[str]
    packs: tuple[str, ...] = ()
    pack_bytes: int = 0


def leftovers(*, clean: bool, older_than_s: float) -> Leftovers:
    """Copies of dead runs, removed with `clean`; and other files that no process of this user has open."""
    found = orphans(older_than_s)
    sizes = {path: size for path in found if (size := remains.size_of(path)) is not None}
    removed = remove_orphans(older_than_s) if clean else []
    others = remains.unused_files()
    packs = remains.unused_packs()
    return Leftovers(
        copies=[str(path) for path in found],
        copy_bytes=sum(sizes.values()),
        removed=[str(path) for path in removed],
        others=[f"{path}{'/' * path.is_dir()}" for path in others],
        other_bytes=sum(remains.size_of(path) or 0 for path in others),
        older_than_s=older_than_s,
        sessions=[str(path) for path in remains.dead_sessions()],
        packs=tuple(str(path) for path in packs),
        pack_bytes=sum(remains.size_of(path) or 0 for path in packs),
    )


class Disk(NamedTuple):
    """The file system of the run's folder. Speeds in bytes/s; 0 if they were not measured. `failure`: what did not work."""

    folder: str
    kind: str
    free: int
    written: int
    write_speed: float
    read_speed: float
    locks: bool
    links: bool
    failure: str


def disk(folder: Path, max_bytes: int, max_s: float) -> Disk:
    """Write a file of up to `max_bytes` in up to `max_s` seconds, flush, rename and read it back; try a lock and a hard link.

    `folder` need not exist: then the nearest existing folder above it is measured. No file remains.
    """
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    kind = _file_system(place)
    written = free = 0
    write_speed = read_speed = 0.0
    locks = links = False
    doing = "reading its size"
    path = place / f".mpitrain-doctor-{uuid4().hex}"
    other = path.with_name(path.name + "-2")
    try:
        room = os.statvfs(place)
        free = room.f_bavail * room.f_frsize
        doing = "writing a file"
        chunk, digest = os.urandom(min(1 << 20, max_bytes)), xxhash.xxh3_64()
        begin = time.perf_counter()
        with path.open("xb", buffering=0) as file:
            while written < max_bytes and time.perf_counter() - begin < max_s:
                piece = chunk[: max_bytes - written]
                if file.write(piece) != len(piece):
                    raise OSError(28, "No space left on device")
                digest.update(piece)
                written += len(piece)
            doing = "fsync"
            os.fsync(file.fileno())
            write_speed = written / (time.perf_counter() - begin)
        doing = "a rename"
        path.rename(other)
        doing = "reading the file back"
        with other.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # else the page cache answers
            begin, again = time.perf_counter(), xxhash.xxh3_64()
            while piece := file.read(1 << 20):
                again.update(piece)
            read_speed = written / max(time.perf_counter() - begin, 1e-9)
            if again.digest() != digest.digest():
                raise OSError(5, "the contents differ from what was written")
        with suppress(OSError):
            locks = _lock_works(other)
        with suppress(OSError):
            os.link(other, path)
            links = True
        failure = ""
    except OSError as error:
        failure = f"{doing}: {error.strerror or error}"
    finally:
        for each in (path, other):
            with suppress(OSError):
                each.unlink(missing_ok=True)
    return Disk(str(place), kind, free, written, write_speed, read_speed, locks, links, failure)


def _lock_works(path: Path) -> bool:
    """Whether a second lock of a file is refused, as it must be."""
    with path.open("rb+") as first, path.open("rb+") as second:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class Temporary(NamedTuple):
    """The folder for temporary files, in which MPI keeps its sockets."""

    folder: str
    free: int
    failure: str


def temporary() -> Temporary:
    folder = gettempdir() if not os.environ.get("TMPDIR") else os.environ["TMPDIR"]
    path = Path(folder) / f"mpitrain-doctor-{uuid4().hex}"
    try:
        room = os.statvfs(folder)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
        return Temporary(folder, room.f_bavail * room.f_frsize, "")
    except OSError as error:
        return Temporary(folder, 0, error.strerror or str(error))
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
