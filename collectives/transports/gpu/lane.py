"""The lane of a device: keeps the transports of GPU memory out of each other's way."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class _Member(Protocol):
    def synchronize(self) -> None:
        """Block until its work on the device has ended."""


class Lane:
    """One process's use of one device for communication: by NCCL or by CUDA-aware MPI, never by both at a time.

    Both make a device wait for others, and NCCL's kernels hold the device meanwhile: where ranks start the two in different order
    they wait for each other for ever (NCCL's user guide, "Inter-GPU Communication with CUDA-aware MPI"). The same holds for two
    NCCL communicators on two streams, so all of a device share one stream.
    """

    def __init__(self) -> None:
        self._stream: int | None = None
        self._members: list[_Member] = []
        self._lock = threading.RLock()
        self._in_mpi = False

    def join(self, member: _Member, create_stream: Callable[[], int]) -> int:
        """Add an NCCL communicator; returns the stream of all of them, which lives as long as the process."""
        if self._stream is None:
            self._stream = create_stream()
        self._members.append(member)
        return self._stream

    def leave(self, member: _Member) -> None:
        """Remove an NCCL communicator, whose work has ended or is of no more interest. Idempotent."""
        self._members = [other for other in self._members if other is not member]

    @contextmanager
    def nccl(self, timeout_s: float) -> Iterator[None]:
        """Around the start of an NCCL operation: an MPI call on the device, by another thread, has ended."""
        with self._hold(timeout_s):
            assert not self._in_mpi, "an NCCL operation inside a CUDA-aware MPI call"
            yield

    @contextmanager
    def mpi(self, timeout_s: float = 600.0) -> Iterator[None]:
        """Around a blocking CUDA-aware MPI call: NCCL's work on the device has ended, and none starts before the block's end."""
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
