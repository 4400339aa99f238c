"""Memory that the ranks of a node share: its two allocators. What is done in it: shared.py.

- `shared`: one array for the whole node. An all-gather into it is: write your part, barrier.
- `empty`: one array per rank, whose peers can read it. A reduce-scatter reads each peer's part once and writes 1/N of it.

Files in the node's shared-memory file system, mapped by every rank and unlinked at once: nothing is left behind however the job
ends. Not MPI windows: those do not survive a dead rank.
"""

import mmap
import os
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any
from uuid import uuid4

import numpy as np

from collectives.arrays.buffer import address_of
from collectives.bench.units import show_bytes
from collectives.diagnosis import together

_ALIGN = mmap.PAGESIZE


def folder() -> Path:
    """Where the node's shared memory lives: MPITRAIN_SHM_DIR, else /dev/shm, else the folder for temporary files."""
    chosen = os.environ.get("MPITRAIN_SHM_DIR", "/dev/shm")
    return Path(chosen if "MPITRAIN_SHM_DIR" in os.environ or os.path.isdir(chosen) else gettempdir())


@dataclass(frozen=True)
class _Segment:
    """One mapped file. `stride` is the bytes from one rank's array to the next; 0 where all share one array."""

    number: int  # in order of allocation: the same on every rank
    # Weak: the arrays keep the mapping alive, and the memory goes when the last of them does.
    mapping: weakref.ref[mmap.mmap]
    address: int
    length: int
    stride: int


class NodeMemory:
    """The shared memory of the ranks of `mpi`, all on one node. Allocating is collective."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._segments: dict[int, _Segment] = {}  # by number
        self._starts: list[int] = []  # their addresses, rising
        self._numbers: list[int] = []  # in the order of these
        self._num_allocated = 0
        self._listeners: list[weakref.WeakMethod[Callable[[], None]]] = []

    def on_change(self, listener: Callable[[], None]) -> None:
        """Have `listener` called whenever memory is mapped here, and before it is unmapped.

        `listener` is a method of an object, which this list does not keep alive.
        """
        self._listeners[:] = [other for other in self._listeners if other() is not None]
        self._listeners.append(weakref.WeakMethod(listener))

    def shared(self, nbytes: int) -> np.ndarray:
        """`nbytes` bytes of zeros that are the same memory on every rank."""
        return self._map(nbytes, stride=0)[:nbytes]

    def empty(self, nbytes: int) -> np.ndarray:
        """`nbytes` bytes of this rank's own, which its peers can read. Zeros."""
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
                    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
                    os.ftruncate(fd, length)
            with together(mpi, doing):
                fd = os.open(path, os.O_RDWR) if fd < 0 else fd
                # Each rank reserves the part it will touch most, so that the pages lie near its cores. Reserving turns a full
                # file system into an error here; a plain write to a mapping would end the process with SIGBUS later.
                begin, end = (length * (mpi.rank + i) // mpi.size for i in (0, 1))
                self._reserve(fd, begin, end - begin)
                mapping = mmap.mmap(fd, length)
        finally:
            # `together` has brought all ranks here: everyone has opened the file or failed.
            if fd >= 0:
                os.close(fd)
            if mpi.rank == 0:
                Path(path).unlink(missing_ok=True)
        flat = np.frombuffer(mapping, np.uint8)
        self._num_allocated += 1
        # The callback holds the list alone: a reference to this object would keep it alive in a cycle.
        mapped = weakref.ref(mapping, partial(_tell, self._listeners))
        new = _Segment(self._num_allocated, mapped, address_of(flat), length, stride)
        alive = [segment for segment in self._segments.values() if segment.mapping() is not None]
        segments = sorted([*alive, new], key=lambda segment: segment.address)
        self._segments = {segment.number: segment for segment in segments}
        self._starts, self._numbers = [segment.address for segment in segments], list(self._segments)
        _tell(self._listeners)
        return flat

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
        """Every rank's `empty` array of which `flat` is this rank's, in order of rank."""
        number, at = self.find(flat)
        stride = self._segments[number].stride
        within = at - self._mpi.rank * stride
        views = [self.view(number, rank * stride + within, flat.nbytes) for rank in range(self._mpi.size)]
        return [view for view in views if view is not None]  # which all are: `flat` keeps them alive

    @property
    def holds_none(self) -> bool:
        """Whether nothing was allocated here: then no array needs looking for."""
        return not self._segments

    def find(self, flat: np.ndarray) -> tuple[int, int]:
        """(number of the allocation, byte in it) of `flat`, for `view` on any rank; (0, its address) where it is private memory."""
        address = address_of(flat)
        index = bisect_right(self._starts, address) - 1
        if flat.size and index >= 0:  # without elements its address says nothing
            segment = self._segments[self._numbers[index]]
            at = address - segment.address
            if at + flat.nbytes <= segment.length and segment.mapping() is not None:
                return segment.number, at
        return 0, address

    def view(self, number: int, at: int, nbytes: int) -> np.ndarray | None:
        """The bytes that a rank of the node `find`s at this place; None if this rank has let go of its own array of the allocation."""
        segment = self._segments.get(number)
        mapping = None if segment is None else segment.mapping()
        return None if mapping is None else np.frombuffer(mapping, np.uint8, nbytes, at)

    def is_one_array(self, number: int) -> bool:
        """Whether all ranks see the same elements there: `shared`, not `empty`."""
        return number in self._segments and self._segments[number].stride == 0

    def place(self, flat: np.ndarray) -> str:
        """Where `flat` lies, in words that are the same on all ranks that pass the same place of the same allocation."""
        number, at = self.find(flat)
        if not number:
            return "private memory"
        stride = self._segments[number].stride
        return f"node memory {number} + {at % stride if stride else at} bytes"


def _tell(listeners: Sequence[weakref.WeakMethod[Callable[[], None]]], *_: object) -> None:
    for reference in listeners:
        if (listener := reference()) is not None:
            listener()
