"""Node memory, which the ranks of a node share: its two allocators. shared.py has the collectives in it.

- `shared`: one array for the whole node. In an all-gather into it each rank writes its part, and all meet in a barrier.
- `empty`: one array per rank, which the other ranks can read. In a reduce-scatter each rank reads its part of every array once.

The memory is a file in the node's shared-memory file system. Every rank maps it, and it is unlinked at once, so that no file remains
however the job ends. MPI windows are not used because they do not survive a dead rank. One rank alone needs no file.

[Note: or anonymous] The file system may be small (64 MB in a container), full, missing or read-only. What the library needs for its own
work, and for data that each rank would otherwise read for itself, then lies in an anonymous file (anonymous.py): with the same
algorithms, bits and speed. The arrays of callers are an error instead, because an anonymous file takes memory that no folder limits.
"""

import logging
import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from collectives.arrays.buffer import address_of
from collectives.cgroup import ENDLESS, MORE_MEMORY
from collectives.diagnosis.together import together
from collectives.environment import USUAL_MEMORY_FOLDER, memory_folder
from collectives.files import open_new
from collectives.texts import show_bytes
from collectives.transports.node import anonymous, mappings
from collectives.transports.node.mappings import Segment, Segments

_ALIGN = mmap.PAGESIZE
_UNCHECKED_BYTES = 1 << 26  # to read what memory is available takes as long as to allocate some MiB
_log = logging.getLogger("collectives")

_LARGER = "make it larger, or set MPITRAIN_SHM_DIR to a folder in memory that has more"
OTHER_FOLDER = "set MPITRAIN_SHM_DIR to a folder in memory that this user may write to"


def room() -> int:
    """The bytes that this process can put into `memory_folder`: 0 if it cannot make a file there, and no more than it may take."""
    return min(free_in_folder(), anonymous.available_bytes())


def remedy(nbytes: int) -> str:
    """What a user may do who lacks room for `nbytes`."""
    if anonymous.available_bytes() < nbytes:
        return MORE_MEMORY
    if not os.path.isdir(memory_folder()):
        return "it is no folder: let MPITRAIN_SHM_DIR name one in memory that this user may write to, or unset it"
    return _LARGER if _is_usable() else OTHER_FOLDER


def _is_usable() -> bool:
    """Whether this process can make files in `memory_folder`. In a read-only file system it cannot."""
    return os.access(memory_folder(), os.W_OK | os.X_OK)


def free_in_folder() -> int:
    """The bytes that are free in `memory_folder`, whatever memory there is; 0 if this process cannot make a file there."""
    try:
        there = os.statvfs(memory_folder())
    except OSError:
        return 0
    if not _is_usable():
        return 0
    # A file system in memory that was mounted without a limit has a size of 0.
    return there.f_bavail * there.f_frsize if there.f_blocks else ENDLESS


_said: set[str] = set()


def say_short(rank: int, what: str, why: object, log: logging.Logger = _log) -> None:
    """Print, on rank 0 of those that lack node memory, what they do without it, and why: each `what` once in a process."""
    log.log(logging.INFO if rank or what in _said else logging.WARNING, "%s: %s", what, why)
    _said.add(what)


class NodeMemory:
    """The shared memory of the ranks of `mpi`, all on one node. Allocating is collective."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self.size: int = mpi.size
        self._segments = Segments()
        self._by_number: dict[int, Segment] = {}
        self._num_allocated = 0

    def shared(self, nbytes: int, *, or_anonymous: bool = False) -> np.ndarray:
        """`nbytes` bytes of zeros, the same memory on every rank. `or_anonymous`: see [Note: or anonymous]."""
        return self._map(nbytes, stride=0, or_anonymous=or_anonymous)[:nbytes]

    def empty(self, nbytes: int, *, or_anonymous: bool = False) -> np.ndarray:
        """`nbytes` bytes of zeros for this rank, which the other ranks can read. `or_anonymous`: as of `shared`."""
        stride = max(-(-nbytes // _ALIGN), 1) * _ALIGN
        start = self._mpi.rank * stride
        return self._map(stride * self.size, stride, or_anonymous=or_anonymous)[start : start + nbytes]

    def check_room(self, nbytes: int) -> None:
        """OSError on all ranks if now there is neither room for `nbytes` in the folder nor anonymous memory. Collective."""
        if self.size > 1 and self._mpi.bcast(free_in_folder() < nbytes):
            self._map_anonymous(1, f"{memory_folder()} has too little room for {show_bytes(nbytes)}; {remedy(nbytes)}")

    def _map(self, nbytes: int, stride: int, *, or_anonymous: bool) -> np.ndarray:
        length = max(nbytes, 1)
        if self.size == 1:
            with together(self._mpi, f"cannot take {show_bytes(nbytes)} of memory"):
                self._check(length)
                mapping = mmap.mmap(-1, length)  # of the kind that forked processes share, too
            return self._add(mapping, stride)
        try:
            mapping = self._map_file(length, nbytes)
            if not os.environ.get("MPITRAIN_SHM_DIR") and memory_folder() != USUAL_MEMORY_FOLDER:
                why = (
                    f"there is no {USUAL_MEMORY_FOLDER}; this folder may be on a disk, which is slower: {OTHER_FOLDER}"
                )
                say_short(self._mpi.rank, f"node memory lies in {memory_folder()}", why)
        except OSError as error:  # on all ranks
            if not or_anonymous or isinstance(error, anonymous.ShortOfMemoryError):
                raise
            mapping = self._map_anonymous(length, str(error))
            _log.info("anonymous memory in place of a file: %s", error)
        return self._add(mapping, stride)

    def _map_file(self, length: int, nbytes: int) -> mmap.mmap:
        """Map a new file of the folder. `nbytes`: what was asked for. OSError on all ranks if it has no room, or cannot be made."""
        mpi = self._mpi
        proposal = memory_folder() / f"mpitrain-{os.getpid()}-{uuid4().hex}"
        path, length_0 = mpi.bcast((str(proposal), length))
        fd = -1
        try:
            doing = f"cannot share {show_bytes(nbytes)} of node memory in {os.path.dirname(path)}"
            with together(mpi, doing):
                if length != length_0:
                    raise ValueError(f"{length} bytes asked for here, {length_0} on rank 0")
                if mpi.rank == 0:
                    self._check(length)
                    fd = self._open(path)
                    os.ftruncate(fd, length)
            with together(mpi, doing):
                fd = os.open(path, os.O_RDWR) if fd < 0 else fd
                # If the file system is full, reserving fails here; without it a later write would end the process with SIGBUS.
                begin, end = self._part(length)
                self._reserve(fd, begin, end - begin)
                mapping = mmap.mmap(fd, length)
        finally:
            # After `together` every rank has opened the file or failed.
            if fd >= 0:
                os.close(fd)
            if mpi.rank == 0:
                with suppress(OSError):  # it may not be there, and the folder may be read-only
                    Path(path).unlink()
        return mapping

    def _map_anonymous(self, length: int, why: str) -> mmap.mmap:
        """Map a new anonymous file of rank 0. OSError on all ranks if one of them cannot. `why`: there is no file in the folder."""
        mpi, fd, place = self._mpi, -1, None
        doing = f"{why}; nor is there anonymous memory"
        try:
            with together(mpi, doing):
                if mpi.rank == 0:
                    fd = anonymous.make(length)
                    place = anonymous.place_of(fd)
            place = mpi.bcast(place)
            with together(mpi, doing):
                fd = anonymous.open_at(place) if fd < 0 else fd
                begin, end = self._part(length)
                if begin < end:
                    os.posix_fallocate(fd, begin, end - begin)
                mapping = mmap.mmap(fd, length)
        finally:
            if fd >= 0:
                os.close(fd)
        return mapping

    @staticmethod
    def _check(length: int) -> None:
        if length > _UNCHECKED_BYTES:
            anonymous.check(length)

    def _part(self, length: int) -> tuple[int, int]:
        """The bytes that this rank reserves: those that it will use most, so that the pages lie near its cores."""
        begin, end = (length * (self._mpi.rank + i) // self.size for i in (0, 1))
        return begin, end

    def _add(self, mapping: mmap.mmap, stride: int) -> np.ndarray:
        """Keep account of a new mapping, and return all of it."""
        length = len(mapping)
        flat = np.frombuffer(mapping, np.uint8)
        self._num_allocated += 1
        new = Segment(self._num_allocated, mappings.watched(mapping), address_of(flat), length, stride, self.size)
        self._segments.add(new)
        self._by_number = {segment.number: segment for segment in self._segments}
        mappings.add(new)
        return flat

    @staticmethod
    def _open(path: str) -> int:
        try:
            return open_new(path, 0o600)
        except OSError as error:  # the folder is not there, or read-only
            raise type(error)(f"{error}; {OTHER_FOLDER}") from None

    @staticmethod
    def _reserve(fd: int, start: int, length: int) -> None:
        if length == 0:
            return
        try:
            os.posix_fallocate(fd, start, length)
        except OSError as error:
            free = os.fstatvfs(fd)
            raise OSError(
                f"{error.strerror}: {show_bytes(free.f_bavail * free.f_frsize)} are free; {_LARGER}"
            ) from None

    def peers(self, flat: np.ndarray) -> list[np.ndarray]:
        """All ranks' arrays at the place of `flat` in this rank's `empty` array, in order of rank."""
        number, at = self.find(flat)
        stride = self._by_number[number].stride
        within = at - self._mpi.rank * stride
        views = [self.view(number, rank * stride + within, flat.nbytes) for rank in range(self._mpi.size)]
        return [view for view in views if view is not None]  # all of them: `flat` keeps the mapping alive

    @property
    def holds_none(self) -> bool:
        """Whether no memory was allocated here, so that `find` need not be called."""
        return not self._by_number

    def find(self, flat: np.ndarray) -> tuple[int, int]:
        """(number of the allocation, byte offset in it) of `flat`, for `view` on any rank; (0, its address) if it is private memory."""
        address = address_of(flat)
        # The address of an empty array has no meaning.
        segment = self._segments.at(address, flat.nbytes) if flat.size else None
        return (0, address) if segment is None else (segment.number, address - segment.address)

    def view(self, number: int, at: int, nbytes: int) -> np.ndarray | None:
        """The bytes at a place that `find` gave on any rank; None if this rank has freed its own array of the allocation."""
        segment = self._by_number.get(number)
        mapping = None if segment is None else segment.mapping()
        return None if mapping is None else np.frombuffer(mapping, np.uint8, nbytes, at)

    def is_one_array(self, number: int) -> bool:
        """Whether the allocation is a `shared` array, not `empty` arrays."""
        return number in self._by_number and self._by_number[number].stride == 0

    def place(self, flat: np.ndarray) -> str:
        """A description of the place of `flat`, equal on all ranks that pass the same place of the same allocation."""
        number, at = self.find(flat)
        if not number:
            return "private memory"
        stride = self._by_number[number].stride
        return f"node memory {number} + {at % stride if stride else at} bytes"
