"""Memory that the ranks of a node share: the two allocators, and collectives that read and write it directly.

- `shared`: one array for the whole node. An all-gather into it is: write your part, barrier.
- `empty`: one array per rank, whose peers can read it. A reduce-scatter reads each peer's part once and writes 1/N of it.

Files in the node's shared-memory file system, mapped by every rank and unlinked at once: nothing is left behind however the job
ends. Not MPI windows: those do not survive a dead rank. Every wait here is an MPI barrier, which also orders the memory.
"""

import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import Any
from uuid import uuid4

import numpy as np

from collectives.diagnosis import together
from collectives.dtypes import DType
from collectives.reduction import reduce_into

_ALIGN = mmap.PAGESIZE


def folder() -> Path:
    """Where the node's shared memory lives: MPITRAIN_SHM_DIR, else /dev/shm, else the folder for temporary files."""
    chosen = os.environ.get("MPITRAIN_SHM_DIR", "/dev/shm")
    return Path(chosen if "MPITRAIN_SHM_DIR" in os.environ or os.path.isdir(chosen) else gettempdir())


def _address(flat: np.ndarray) -> int:
    return flat.__array_interface__["data"][0]


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
        self._segments: list[_Segment] = []
        self._num_allocated = 0

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
            doing = f"cannot share {nbytes / 1e6:.1f} MB of node memory in {os.path.dirname(path)}"
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
        self._segments = [segment for segment in self._segments if segment.mapping() is not None]
        self._num_allocated += 1
        self._segments.append(
            _Segment(self._num_allocated, weakref.ref(mapping), _address(flat), length, stride),
        )
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
                f"{error.strerror}: {free.f_bavail * free.f_frsize / 1e6:.1f} MB are free; make it larger, "
                "or set MPITRAIN_SHM_DIR to a folder in memory that has more"
            ) from None

    def _find(self, flat: np.ndarray) -> tuple[_Segment, int] | None:
        """The segment that holds all of `flat`, and where in it. None for an empty array: it has no address to go by."""
        if not self._segments or not flat.size:
            return None
        address = _address(flat)
        for segment in self._segments:
            at = address - segment.address
            if at >= 0 and at + flat.nbytes <= segment.length and segment.mapping() is not None:
                return segment, at
        return None

    def is_shared(self, flat: np.ndarray) -> bool:
        """Whether `flat` lies in an array that is the same memory on every rank."""
        found = self._find(flat)
        return found is not None and found[0].stride == 0

    def is_readable(self, flat: np.ndarray) -> bool:
        """Whether peers can read their own array at the place of `flat`: it lies in this rank's part of an `empty` array."""
        found = self._find(flat)
        return found is not None and found[0].stride > 0

    def place(self, flat: np.ndarray) -> str:
        """Where `flat` lies, in words that are the same on all ranks that pass the same place of the same allocation."""
        found = self._find(flat)
        if found is None:
            return "private memory"
        segment, at = found
        return f"node memory {segment.number} + {at % segment.stride if segment.stride else at} bytes"

    def _peers(self, flat: np.ndarray) -> list[np.ndarray]:
        """Every rank's array at the place of `flat`, this rank's own included, in order of rank."""
        found = self._find(flat)
        assert found is not None
        segment, at = found
        mapping = segment.mapping()
        assert mapping is not None
        within = at - self._mpi.rank * segment.stride
        return [
            np.frombuffer(mapping, flat.dtype, flat.size, rank * segment.stride + within)
            for rank in range(self._mpi.size)
        ]

    # Collectives. Never of empty arrays. All ranks pass arrays from the same allocation; selection.py sees to it.

    def all_gather(self, out: np.ndarray, flat: np.ndarray, counts: Sequence[int]) -> None:
        """`out` is one array for the node: each rank writes its part, unless it already stands there."""
        start = sum(counts[: self._mpi.rank])
        mine = out[start : start + flat.size]
        # Both barriers always: whether a part already stands in its place may differ from rank to rank.
        self._mpi.Barrier()  # nobody still reads what stood here
        if flat.size and _address(mine) != _address(flat):
            mine[...] = flat
        self._mpi.Barrier()

    def reduce_scatter(self, out: np.ndarray, flat: np.ndarray, op: str, counts: Sequence[int], dtype: DType) -> None:
        """Each rank adds its part of all peers' arrays, in order of rank, rounding once."""
        start = sum(counts[: self._mpi.rank])
        parts = [peer[start : start + out.size] for peer in self._peers(flat)]
        self._mpi.Barrier()  # everyone has written
        reduce_into(out, parts, op, dtype, divisor=self._mpi.size if op == "avg" else 1)
        self._mpi.Barrier()  # everyone has read: the caller may write again

    def all_reduce(self, flat: np.ndarray, op: str, dtype: DType) -> None:
        """Each rank adds its slice of all peers' arrays into its own, then copies the other slices from their owners."""
        size, peers = self._mpi.size, self._peers(flat)
        bounds = [flat.size * rank // size for rank in range(size + 1)]
        slices = [slice(bounds[rank], bounds[rank + 1]) for rank in range(size)]
        mine = slices[self._mpi.rank]
        self._mpi.Barrier()
        # Nobody else reads this rank's array in its own slice, so the sum may be written there at once.
        reduce_into(flat[mine], [peer[mine] for peer in peers], op, dtype, divisor=size if op == "avg" else 1)
        self._mpi.Barrier()
        for rank, part in enumerate(slices):
            if rank != self._mpi.rank:
                flat[part] = peers[rank][part]
        self._mpi.Barrier()
