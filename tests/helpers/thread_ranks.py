"""Ranks that are threads of one process: what `ckpt` asks of a communicator, without MPI."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

from collectives.diagnosis.together import joined


class ThreadRanks:
    """One of `size` ranks; `shared`: what they have in common."""

    def __init__(self, rank: int, size: int, shared: tuple[threading.Barrier, list[Any]]) -> None:
        self.rank, self.size = rank, size
        self._meeting, self._slots = shared

    def barrier(self) -> None:
        self._meeting.wait(timeout=60)

    def all_gather_object(self, obj: Any) -> list[Any]:
        self._slots[self.rank] = obj
        self.barrier()
        gathered = list(self._slots)
        self.barrier()
        return gathered

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        return self.all_gather_object(obj)[root]

    def together(self, doing: str = "") -> AbstractContextManager[None]:
        return joined(self.all_gather_object, doing)


def on_ranks(size: int, act: Callable[[ThreadRanks], Any]) -> list[Any]:
    """`act(comm)` on each of `size` ranks; what they return, in order. What the first raises is raised."""
    shared = threading.Barrier(size), [None] * size
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(act, ThreadRanks(rank, size, shared)) for rank in range(size)]
    return [future.result() for future in futures]
