"""A barrier between the ranks of a node: each rank has a word in memory that all of them can read.

A rank counts its meetings in its own word and waits until the other ranks' words have reached the count. This costs one transfer of a
cache line between cores; a barrier of the MPI library costs several messages. Like that barrier, a waiting rank lets MPI make progress
on messages for other ranks, and lets other processes and threads run.
"""

import os
import platform
import time
from collections.abc import Callable
from typing import Any

WORDS = 8  # for each rank: a full cache line
_SPINS = 100  # reads of a word before a rank polls MPI: some microseconds
_YIELDS = 1 << 12  # turns in which the rank only yields the core: some milliseconds
_SLEEP = 50e-6  # seconds of sleep in each later turn
# x86-64 keeps stores in order and loads in order for all cores. On other CPUs `meet` is MPI's barrier, which orders them.
IN_ORDER = platform.machine().lower() in ("x86_64", "amd64")


class NodeMeeting:
    """The meetings of the ranks of `mpi`. `words`: WORDS words for each rank, in memory that all ranks share, all zeros at first."""

    def __init__(self, mpi: Any, words: memoryview) -> None:
        self._mpi, self._words = mpi, words
        self._mine = WORDS * mpi.rank
        self._others = [WORDS * rank for rank in range(mpi.size) if rank != mpi.rank]
        self._count = 0
        if not IN_ORDER:
            self.meet = mpi.Barrier  # type: ignore[method-assign]

    def arrive(self) -> int:
        """Note that this rank has come to the next meeting, without a wait; returns its number. This and the next two need IN_ORDER."""
        self._count = count = self._count + 1
        self._words[self._mine] = count
        return count

    def is_complete(self, count: int) -> bool:
        """Whether every rank has come to meeting `count`."""
        words = self._words
        return self._count >= count and all(words[other] >= count for other in self._others)

    def wait(self, count: int, advance: Callable[[], None] | None = None) -> None:
        """Return when every rank has come to meeting `count`. `advance` is called again and again while this rank waits."""
        for other in self._others:
            if self._words[other] < count:
                self._wait(other, count, advance)

    def meet(self) -> None:
        """Return when every rank has called this. Writes of a rank before the call are visible to the other ranks after it."""
        words = self._words  # arrive() and wait() without calls, because all of it takes a microsecond
        self._count = count = self._count + 1
        words[self._mine] = count
        for other in self._others:
            if words[other] < count:
                self._wait(other, count)

    def _wait(self, other: int, count: int, advance: Callable[[], None] | None = None) -> None:
        words = self._words
        for _ in range(_SPINS):
            if words[other] >= count:
                return
        turns = 0
        while words[other] < count:
            self._mpi.Iprobe()  # MPI makes progress, and other threads of this process can run
            if advance is not None:
                advance()
            turns += 1
            if turns < _YIELDS:
                os.sched_yield()
            else:
                time.sleep(_SLEEP)
