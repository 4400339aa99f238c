"""Node memory, which the ranks of a node share: its two allocators. shared.py has the collectives in it.

- `shared`: one array for the whole node. In an all-gather into it each rank writes its part, and all meet in a barrier.
- `empty`: one array per rank, which the other ranks can read. In a reduce-scatter each rank reads its part of every array once.

The memory is a file in the node's shared-memory file system. Every rank maps it, and it is unlinked at once, so that no file remains
however the job ends. MPI windows are not used because they do not survive a dead rank.
"""

import logging
import mmap
import os
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any
from uuid import uuid4

import numpy as np

from collectives.arrays.buffer import address_of
from collectives.diagnosis.together import together
from collectives.files import open_new
from collectives.texts import show_bytes

_ALIGN = mmap.PAGESIZE
_log = logging.getLogger("collectives")


def folder() -> Path:
    """The folder of the shared-memory files: MPITRAIN_SHM_DIR, else /dev/shm, else the folder for temporary files."""
    chosen = os.environ.get("MPITRAIN_SHM_DIR", "/dev/shm")
    return Path(chosen if "MPITRAIN_SHM_DIR" in os.environ or os.path.isdir(chosen) else gettempdir())


def room() -> int:
    """The bytes that are free in `folder`; 0 if this process cannot make a file there."""
    try:
        there = os.statvfs(folder())
    except OSError:
        return 0
    is_usable = not there.f_flag & os.ST_RDONLY and os.access(folder(), os.W_OK | os.X_OK)
    return there.f_bavail * there.f_frsize if is_usable else 0


_said: set[str] = set()


def say_short(rank: int, text: str) -> None:
    """Print, on rank 0 of those that lack node memory, what they do without it, each thing once in a process. `text`: WHAT: WHY."""
    what = text.partition(":")[0]
    _log.log(logging.INFO if rank or what in _said else logging.WARNING, "%s", text)
    _said.add(what)


@dataclass(frozen=True)
class _Segment:
    """One mapped file. `stride`: the number of bytes from one rank's array to the next; 0 if all ranks share one array."""

    number: int  # in order of allocation: the same on every rank
    # A weak reference: the arrays keep the mapping alive, and it is unmapped with its last array.
    mapping: weakref.ref[mmap.mmap]
    address: int
    length: int
    stride: int


_shares: "weakref.WeakKeyDictionary[mmap.mmap, int]" = weakref.WeakKeyDictionary()  # bytes of each living mapping


def mapped_share_bytes() -> int:
    """This rank's share of all node memory that its process has mapped: of each mapping the Nth part, where N ranks have it."""
    return sum(_shares.values())


class NodeMemory:
    """The shared memory of the ranks of `mpi`, all on one node. Allocating is collective."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self.size: int = mpi.size
        self._segments: dict[int, _Segment] = {}  # by number
        self._starts: list[int] = []  # the addresses of the segments, sorted
        self._numbers: list[int] = []  # the numbers of the segments, in the order of `_starts`
        self._num_allocated = 0
        self._listeners: list[weakref.WeakMethod[Callable[[], None]]] = []

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever memory is mapped here, and before it is unmapped.

        `listener` is a bound method; this list does not keep its object alive.
        """
        self._listeners[:] = [other for other in self._listeners if other() is not None]
        self._listeners.append(weakref.WeakMethod(listener))

    def shared(self, nbytes: int) -> np.ndarray:
        """`nbytes` bytes of zeros, the same memory on every rank."""
        return self._map(nbytes, stride=0)[:nbytes]

    def empty(self, nbytes: int) -> np.ndarray:
        """`nbytes` bytes of zeros for this rank, which the other ranks can read."""
        stride = max(-(-nbytes // _ALIGN), 1) * _ALIGN
        start = self._mpi.rank * stride
        return self._map(stride * self._mpi.size, stride)[start : start + nbytes]

    def _map(self, nbytes: int, stride: int) -> np.ndarray:
        mpi, length = self._mpi, max(nbytes, 1)
        proposal = folder() / f"mpitrain-{os.getpid()}-{uuid4().hex}"
        path, length_0 = mpi.bcast((str(proposal), length))
        fd = -1
        try:
            doing = f"cannot share {show_bytes(nbytes)} of node memory in {os.path.dirname(path)}"
            with together(mpi, doing):
                if length != length_0:
                    raise ValueError(f"{length} bytes asked for here, {length_0} on rank 0")
                if mpi.rank == 0:
                    fd = self._open(path)
                    os.ftruncate(fd, length)
            with together(mpi, doing):
                fd = os.open(path, os.O_RDWR) if fd < 0 else fd
                # Each rank reserves the part that it will use most, so that the pages lie near its cores. If the file system is
                # full, reserving fails here; without it a later write to the mapping would end the process with SIGBUS.
                begin, end = (length * (mpi.rank + i) // mpi.size for i in (0, 1))
                self._reserve(fd, begin, end - begin)
                mapping = mmap.mmap(fd, length)
        finally:
            # After `together` every rank has opened the file or failed.
            if fd >= 0:
                os.close(fd)
            if mpi.rank == 0:
                with suppress(OSError):  # it may not be there, and the folder may be read-only
                    Path(path).unlink()
        flat = np.frombuffer(mapping, np.uint8)
        _shares[mapping] = length // mpi.size
        self._num_allocated += 1
        # The callback refers only to the list: a reference to this object would be a cycle.
        mapped = weakref.ref(mapping, partial(_tell, self._listeners))
        new = _Segment(self._num_allocated, mapped, address_of(flat), length, stride)
        alive = [segment for segment in self._segments.values() if segment.mapping() is not None]
        segments = sorted([*alive, new], key=lambda segment: segment.address)
        self._segments = {segment.number: segment for segment in segments}
        self._starts, self._numbers = [segment.address for segment in segments], list(self._segments)
        _tell(self._listeners)
        return flat

    @staticmethod
    def _open(path: str) -> int:
        try:
            return open_new(path, 0o600)
        except OSError as error:  # the folder is not there, or read-only
            raise type(error)(
                f"{error}; set MPITRAIN_SHM_DIR to a folder in memory that this user may write to"
            ) from None

    @staticmethod
    def _reserve(fd: int, start: int, length: int) -> None:
        if length == 0:
            return
        try:
            os.posix_fallocate(fd, start, length)
        except OSError as error:
            free = os.fstatvfs(fd)
            raise OSError(
                f"{error.strerror}: {show_bytes(free.f_bavail * free.f_frsize)} are free; make it larger, "
                "or set MPITRAIN_SHM_DIR to a folder in memory that has more"
            ) from None

    def peers(self, flat: np.ndarray) -> list[np.ndarray]:
        """All ranks' arrays at the place of `flat` in this rank's `empty` array, in order of rank."""
        number, at = self.find(flat)
        stride = self._segments[number].stride
        within = at - self._mpi.rank * stride
        views = [self.view(number, rank * stride + within, flat.nbytes) for rank in range(self._mpi.size)]
        return [view for view in views if view is not None]  # all of them: `flat` keeps the mapping alive

    @property
    def holds_none(self) -> bool:
        """Whether no memory was allocated here, so that `find` need not be called."""
        return not self._segments

    def find(self, flat: np.ndarray) -> tuple[int, int]:
        """(number of the allocation, byte offset in it) of `flat`, for `view` on any rank; (0, its address) if it is private memory."""
        address = address_of(flat)
        index = bisect_right(self._starts, address) - 1
        if flat.size and index >= 0:  # the address of an empty array has no meaning
            segment = self._segments[self._numbers[index]]
            at = address - segment.address
            if at + flat.nbytes <= segment.length and segment.mapping() is not None:
                return segment.number, at
        return 0, address

    def view(self, number: int, at: int, nbytes: int) -> np.ndarray | None:
        """The bytes at a place that `find` gave on any rank; None if this rank has freed its own array of the allocation."""
        segment = self._segments.get(number)
        mapping = None if segment is None else segment.mapping()
        return None if mapping is None else np.frombuffer(mapping, np.uint8, nbytes, at)

    def is_one_array(self, number: int) -> bool:
        """Whether the allocation is a `shared` array, not `empty` arrays."""
        return number in self._segments and self._segments[number].stride == 0

    def place(self, flat: np.ndarray) -> str:
        """A description of the place of `flat`, equal on all ranks that pass the same place of the same allocation."""
        number, at = self.find(flat)
        if not number:
            return "private memory"
        stride = self._segments[number].stride
        return f"node memory {number} + {at % stride if stride else at} bytes"


def _tell(listeners: Sequence[weakref.WeakMethod[Callable[[], None]]], *_: object) -> None:
    for reference in listeners:
        if (listener := reference()) is not None:
            listener()
