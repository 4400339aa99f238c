"""How far the ranks of a node are from each other: whether their cores share a cache.

Between those that do not, every line that one writes and another has read crosses between the caches, several times more slowly than it
comes from memory. Passing a long array through windows then costs more than reading it where it lies. Measured, since what a virtual
machine says of its cores need not be so.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from collectives.transports.memory import NodeMemory

_BYTES = 1 << 18
_TURNS = 8
_NEAR = 4e9  # bytes a second: within a cache 6 to 9 were measured, between caches 2 to 2.5 (AMD Zen 4)


def are_far(mpi: Any, meet: Callable[[], None]) -> bool:
    """Whether one of the ranks of `mpi` is far from the next. The same on all; collective. OSError if the node's memory is full."""
    memory = NodeMemory(mpi)
    mine = memory.empty(_BYTES)
    next_ = memory.peers(mine)[(mpi.rank + 1) % mpi.size]
    private = np.zeros(_BYTES, np.uint8)
    fastest = float("inf")
    for _ in range(_TURNS):
        start = time.perf_counter()
        mine[...] = private  # what the rank before this one has just read
        fastest = min(fastest, time.perf_counter() - start)
        meet()
        private[...] = next_
        meet()
    seconds: float = max(mpi.allgather(fastest))
    return _BYTES / seconds < _NEAR
