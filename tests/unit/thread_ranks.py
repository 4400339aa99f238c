"""Ranks that are threads of one process: what `ckpt` asks of a communicator, without MPI."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from collectives.diagnosis.together import joint_error, report_of


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

    @contextmanager
    def together(self, doing: str = "") -> Iterator[None]:
        error = None
        try:
            yield
        except Exception as raised:
            error = raised
        found = joint_error(self.all_gather_object(report_of(error)), doing)
        if found is not None:
            raise found[0] from error


def on_ranks(size: int, act: Callable[[ThreadRanks], Any]) -> list[Any]:
    """`act(comm)` on each of `size` ranks; what they return, in order. What the first raises is raised."""
    shared = threading.Barrier(size), [None] * size
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(act, ThreadRanks(rank, size, shared)) for rank in range(size)]
    return [future.result() for future in futures]
