"""The lane of a device: lets only one of NCCL and CUDA-aware MPI use the device at a time."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class _Member(Protocol):
    def synchronize(self) -> None:
        """Block until the work on the device has ended."""


class Lane:
    """One process's use of one device for communication: by NCCL or by CUDA-aware MPI, never by both at the same time.

    Both wait for other devices, and NCCL's kernels occupy the device while they wait. If ranks start the two in different order, they
    wait for each other forever (NCCL's user guide, "Inter-GPU Communication with CUDA-aware MPI"). The same is true for two NCCL
    communicators on two streams, so all NCCL communicators of a device share one stream.
    """

    def __init__(self) -> None:
        self._stream: int | None = None
        self._members: list[_Member] = []
        self._lock = threading.RLock()
        self._in_mpi = False

    def join(self, member: _Member, create_stream: Callable[[], int]) -> int:
        """Add an NCCL communicator. Returns the stream of all NCCL communicators, which exists until the process ends."""
        if self._stream is None:
            self._stream = create_stream()
        self._members.append(member)
        return self._stream

    def leave(self, member: _Member) -> None:
        """Remove an NCCL communicator whose work has ended or was aborted. Idempotent."""
        self._members = [other for other in self._members if other is not member]

    @contextmanager
    def nccl(self, timeout_s: float) -> Iterator[None]:
        """For the start of an NCCL operation: waits until another thread's MPI call on the device has ended."""
        with self._hold(timeout_s):
            assert not self._in_mpi, "an NCCL operation inside a CUDA-aware MPI call"
            yield

    @contextmanager
    def mpi(self, timeout_s: float = 600.0) -> Iterator[None]:
        """For a blocking CUDA-aware MPI call: waits for NCCL's work on the device, and lets no new work start within the block."""
        with self._hold(timeout_s):
            for member in list(self._members):
                member.synchronize()
            before, self._in_mpi = self._in_mpi, True
            try:
                yield
            finally:
                self._in_mpi = before

    @contextmanager
    def _hold(self, timeout_s: float) -> Iterator[None]:
        if not self._lock.acquire(timeout=timeout_s):
            raise TimeoutError(
                f"another thread's MPI call on device memory has not ended after {timeout_s:g} s; start NCCL and CUDA-aware MPI "
                "operations of one device in the same order on all ranks, preferably from one thread"
            )
        try:
            yield
        finally:
            self._lock.release()


_lanes: dict[int, Lane] = {}


def lane_of(index: int) -> Lane:
    """This process's lane of device `index`."""
    return _lanes.setdefault(index, Lane())
