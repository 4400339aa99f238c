"""Anonymous files (Linux's memfd): memory that processes of a node share without a folder.

No file system limits them. They count as memory of the processes, so only the memory of the machine and the limit of a cgroup do. A
process opens the file of another one by /proc. The kernel allows that to processes of the same user that see each other's numbers;
ranks in containers with numbers of their own do not.
"""

import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from collectives import cgroup
from collectives.texts import show_bytes


class ShortOfMemoryError(OSError):
    """More memory was asked for than this process may take."""


class FilePlace(NamedTuple):
    """Where other processes find a file, and what tells it from any other."""

    path: str
    device: int
    inode: int


def make(nbytes: int) -> int:
    """A new file of zeros, open. OSError if the memory or the kernel does not allow it."""
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has none")
    check(nbytes)
    fd = os.memfd_create("mpitrain")
    os.ftruncate(fd, nbytes)
    return fd


def place_of(fd: int) -> FilePlace:
    """The place of a file that this process has open."""
    its = os.fstat(fd)
    return FilePlace(f"/proc/{os.getpid()}/fd/{fd}", its.st_dev, its.st_ino)


def open_at(place: FilePlace) -> int:
    """Open the file of another process, which must have it open still. OSError if the kernel does not allow it."""
    # Before it is opened, because it may be anything: in containers a number may be another process's.
    its = os.stat(place.path)
    if (its.st_dev, its.st_ino) != place[1:]:
        raise OSError(f"{place.path} is another file here")
    return os.open(place.path, os.O_RDWR)


def check(nbytes: int) -> None:
    """ShortOfMemoryError if `nbytes` are more than this process may still take: the kernel would end processes instead."""
    if nbytes > (available := available_bytes()):
        raise ShortOfMemoryError(f"{show_bytes(available)} of memory are available; {cgroup.MORE_MEMORY}")


def available_bytes() -> int:
    """The memory that this process may still take: of the machine with its swap space, and within the limits of its cgroups."""
    available, swap = os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE, 0
    with suppress(OSError, ValueError, KeyError):
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        known = {line[0]: int(line[1]) << 10 for line in lines if line[0] in ("MemAvailable:", "SwapFree:")}
        available, swap = known["MemAvailable:"], known.get("SwapFree:", 0)
    return min(available + swap, within_limits(swap))


def within_limits(swap: int = 0) -> int:
    """The memory that the limits of this process's cgroups leave, whatever the machine has. `swap`: the swap space that is free."""
    within = cgroup.room(cgroup.groups_of(), swap)
    return cgroup.ENDLESS if within is None else within
