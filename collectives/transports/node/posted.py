"""Posted reduce-scatters in node memory: `async_op` without a progress thread.

In a meeting all ranks wait for the slowest, at every call. Here a rank waits for no other rank until its program needs the result. The
rank notes that its array may be read. Whenever it looks and all ranks have noted theirs, it adds up its part of all arrays. The
operation has ended when all ranks have noted that they have read. So ranks that are held up in turn do not add up their delays, as long
as each rank looks now and then.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.transports.node.meeting import IN_ORDER, WORDS, Meeting
from collectives.transports.node.memory import NodeMemory
from collectives.transports.transport import parts

_SLOTS = 4  # operations of which not all ranks have read everything
_SAID = 2  # words in which a rank says where its array lies


class Post:
    """One operation. Its calls, and those of the operations posted before and after it, are made in the order of posting."""

    def __init__(self, posts: "Posts", number: int, nbytes: int, add: Callable[[Sequence[np.ndarray]], None]) -> None:
        self._posts, self._number, self._nbytes, self._add = posts, number, nbytes, add
        self._has_read = False

    def step(self) -> bool:
        """Do what can be done without waiting. Returns whether the operation has ended."""
        posts = self._posts
        if not self._has_read:
            if not posts.posted.is_complete(self._number):
                return False
            self._read()
        return posts.read.is_complete(self._number)

    def finish(self) -> None:
        """Wait for its end."""
        if not self._has_read:
            self._posts.posted.wait(self._number)
            self._read()
        self._posts.read.wait(self._number)

    def _read(self) -> None:
        self._add(self._posts.arrays(self._number, self._nbytes))
        self._posts.read.arrive()
        self._has_read = True


class Posts:
    """The operations that the ranks of `mpi`, all on one node, have posted; `memory`: where their arrays lie. Made by all together."""

    def __init__(self, mpi: Any, memory: NodeMemory) -> None:
        self._rank, self._size, self._memory = mpi.rank, mpi.size, memory
        lengths = [*[WORDS * mpi.size] * 3, _SLOTS * mpi.size * _SAID]
        words = memoryview(NodeMemory(mpi).shared(8 * sum(lengths))).cast("Q")  # type: ignore[arg-type]
        *meetings, self._board = (words[slice(*part)] for part in parts(lengths))
        self.posted, self.read, self.barriers = (Meeting(mpi, words) for words in meetings)
        self._number = 0  # of the last operation

    def takes(self, flat: np.ndarray) -> bool:
        """Whether such an array can be posted: one that lies in an `empty` array, where all ranks' stores are seen in order."""
        number, _ = self._memory.find(flat)
        return IN_ORDER and number != 0 and not self._memory.is_one_array(number)

    @property
    def are_many(self) -> bool:
        """Whether earlier operations must end before another can be posted."""
        return not self.read.is_complete(self._number + 1 - _SLOTS)

    def post(self, flat: np.ndarray, add: Callable[[Sequence[np.ndarray]], None]) -> Post:
        """The peers may read `flat`; `add(arrays)` is to read theirs, in order of rank. Collective, but no rank waits."""
        self._number = number = self._number + 1
        at = self._at(number, self._rank)
        self._board[at], self._board[at + 1] = self._memory.find(flat)
        self.posted.arrive()
        return Post(self, number, flat.nbytes, add)

    def arrays(self, number: int, nbytes: int) -> list[np.ndarray]:
        """The arrays that the ranks have posted. RuntimeError if this rank has freed the allocation of another rank's array."""
        arrays = []
        for rank in range(self._size):
            at = self._at(number, rank)
            view = self._memory.view(self._board[at], self._board[at + 1], nbytes)
            if view is None:
                raise RuntimeError(
                    f"rank {rank} has passed an array of another allocation; expected parts of the same allocation on all ranks"
                )
            arrays.append(view)
        return arrays

    def _at(self, number: int, rank: int) -> int:
        return (number % _SLOTS * self._size + rank) * _SAID
