"""Posted reduce-scatters in node memory: `async_op` without a progress thread.

In a meeting all ranks wait for the slowest rank, at every call. Here a rank waits for no other rank until its program needs the result.
The rank notes that its array may be read. When all ranks have noted this, the next `step` of each rank adds up its part of all arrays.
The operation has ended when all ranks have noted that they have read. So if different ranks are late at different times, their delays
do not add up, as long as each rank calls `step` now and then.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.transports.node.meeting import IN_ORDER, WORDS, NodeMeeting
from collectives.transports.node.memory import NodeMemory
from collectives.transports.transport import parts

_SLOTS = 4  # the most operations that may be unfinished at a time
_SAID = 2  # words for the place of a rank's array


class Post:
    """One operation. For all operations, the methods are called in the order of posting."""

    def __init__(self, posts: "Posts", number: int, nbytes: int, add: Callable[[Sequence[np.ndarray]], None]) -> None:
        self._posts, self._number, self._nbytes, self._add = posts, number, nbytes, add
        self._has_read = False
        self._error: Exception | None = None  # of `add`

    def step(self) -> bool:
        """Make as much progress as possible without a wait. Returns whether the operation has ended."""
        posts = self._posts
        if not self._has_read:
            if not posts.posted.is_complete(self._number):
                return False
            self._read()
        return posts.read.is_complete(self._number)

    def finish(self) -> None:
        """Wait for the end of the operation."""
        if not self._has_read:
            self._posts.posted.wait(self._number)
            self._read()
        self._posts.read.wait(self._number)
        if self._error is not None:
            raise self._error

    def _read(self) -> None:
        try:
            self._add(self._posts.arrays(self._number, self._nbytes))
        except Exception as error:  # raised by `finish`, after this rank has let the others go on
            self._error = error
        self._posts.read.arrive()
        self._has_read = True


class Posts:
    """The posted operations of the ranks of `mpi`, all on one node. `memory`: holds their arrays. Making it is collective."""

    def __init__(self, mpi: Any, memory: NodeMemory) -> None:
        self._rank, self._size, self._memory = mpi.rank, mpi.size, memory
        lengths = [*[WORDS * mpi.size] * 3, _SLOTS * mpi.size * _SAID]
        words = memoryview(NodeMemory(mpi).shared(8 * sum(lengths), or_anonymous=True)).cast("Q")  # type: ignore[arg-type]
        *meetings, self._board = (words[slice(*part)] for part in parts(lengths))
        self.posted, self.read, self.barriers = (NodeMeeting(mpi, words) for words in meetings)
        self._number = 0  # of the last operation

    def takes(self, flat: np.ndarray) -> bool:
        """Whether `flat` can be posted: it must lie in an `empty` array, and the CPU must keep stores IN_ORDER."""
        number, _ = self._memory.find(flat)
        return IN_ORDER and number != 0 and not self._memory.is_one_array(number)

    @property
    def are_many(self) -> bool:
        """Whether earlier operations must end before the next one can be posted."""
        return not self.read.is_complete(self._number + 1 - _SLOTS)

    def post(self, flat: np.ndarray, add: Callable[[Sequence[np.ndarray]], None]) -> Post:
        """Let the other ranks read `flat`; `add(arrays)` will read all ranks' arrays, in order of rank. Collective without a wait."""
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
