"""Where the ranks of a node wait for each other: a word for each in memory that all see.

A rank counts its meetings in its own word, and waits until the others' words say as much. It costs what a cache line takes from core to
core, where a barrier of the MPI library takes several messages. It does what that does meanwhile: it lets MPI carry on with what peers
wait for, and other processes and threads run.
"""

import os
import platform
import time
from typing import Any

WORDS = 8  # of a rank: a cache line of its own
_SPINS = 100  # looks at a word before anything else: some microseconds
_YIELDS = 1 << 12  # turns that only yield the core: some milliseconds
_SLEEP = 50e-6  # seconds between looks from then on
# Here stores become visible in the order in which they were made, and loads are made in order. Elsewhere MPI's barrier orders them.
IN_ORDER = platform.machine().lower() in ("x86_64", "amd64")


class Meeting:
    """The meetings of the ranks of `mpi`. `words`: WORDS words for each, in memory that all see, all zeros at first."""

    def __init__(self, mpi: Any, words: memoryview) -> None:
        self._mpi, self._words = mpi, words
        self._mine = WORDS * mpi.rank
        self._others = [WORDS * rank for rank in range(mpi.size) if rank != mpi.rank]
        self._count = 0
        if not IN_ORDER:
            self.meet = mpi.Barrier  # type: ignore[method-assign]

    def arrive(self) -> int:
        """Come to the next meeting, and go on; its number. Only where stores are IN_ORDER, as the next two."""
        self._count = count = self._count + 1
        self._words[self._mine] = count
        return count

    def is_complete(self, count: int) -> bool:
        """Whether every rank has come to meeting `count`."""
        words = self._words
        return self._count >= count and all(words[other] >= count for other in self._others)

    def wait(self, count: int) -> None:
        """Return when every rank has come to meeting `count`."""
        for other in self._others:
            if self._words[other] < count:
                self._wait(other, count)

    def meet(self) -> None:
        """Return when every rank has called this. Writes of a rank before the call are visible to the other ranks after it."""
        words = self._words  # as arrive() and wait(): one call less, in what takes a microsecond
        self._count = count = self._count + 1
        words[self._mine] = count
        for other in self._others:
            if words[other] < count:
                self._wait(other, count)

    def _wait(self, other: int, count: int) -> None:
        words = self._words
        for _ in range(_SPINS):
            if words[other] >= count:
                return
        turns = 0
        while words[other] < count:
            self._mpi.Iprobe()  # MPI carries on, and so do this process's other threads
            turns += 1
            if turns < _YIELDS:
                os.sched_yield()
            else:
                time.sleep(_SLEEP)
