"""Control messages between all ranks: barriers, small Python objects, and errors that all ranks raise. Never data."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from collectives import diagnosis
from collectives.communicator.arguments import rank_of
from collectives.communicator.transports import Transports
from collectives.diagnosis.recorder import Recorder
from collectives.progress.queue import AsyncQueue
from collectives.progress.work import Arrived, Work
from collectives.transports.node.meeting import IN_ORDER


class Control:
    """The control messages of one communicator, whose methods communicator.py explains."""

    def __init__(
        self,
        mpi: Any,
        *,
        recorder: Recorder,
        queue: AsyncQueue,
        transports: Transports,
        on_progress: "Callable[[], Control]",
    ) -> None:
        """`on_progress()`: the Control that carries out asynchronous barriers: this one, or its twin for the progress thread."""
        self._mpi, self._recorder, self._queue = mpi, recorder, queue
        self._size: int = mpi.size  # stored, because a freed communicator has no size
        self._transports, self._on_progress = transports, on_progress

    def barrier(self) -> None:
        self._queue.flush()
        with self._recorder.enter("barrier"):
            self._mpi.Barrier()

    def issue_barrier(self) -> Work:
        self._queue.progress.pending()  # raises if the communicator was freed
        shared = self._transports.shared
        if IN_ORDER and shared is not None and not self._recorder.checked:
            return Arrived(shared.posts.barriers, self._recorder.log.enter("barrier"), self._queue.progress)
        return self._queue.issue(self._on_progress().barrier, "barrier")

    def broadcast_object(self, obj: Any, root: int) -> Any:
        root = rank_of("broadcast_object", root, self._size)
        self._queue.flush()
        with self._recorder.enter("broadcast_object", root=root):
            return self._mpi.bcast(obj, root)

    def all_gather_object(self, obj: Any) -> list[Any]:
        self._queue.flush()
        with self._recorder.enter("all_gather_object"):
            gathered: list[Any] = self._mpi.allgather(obj)
            return gathered

    def together(self, doing: str) -> AbstractContextManager[None]:
        self._queue.flush()
        if self._recorder.checked:
            self._recorder.enter("together").leave()  # without `doing`, which may differ between the ranks
        return diagnosis.together(self._mpi, doing, self._recorder.log)
