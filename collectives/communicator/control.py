"""Control between all ranks: barriers, small Python objects, and errors that all of them raise. Never data."""

from contextlib import AbstractContextManager
from typing import Any, Literal, overload

from collectives import diagnosis
from collectives.communicator.arguments import rank_of
from collectives.diagnosis.record import Entry, Log
from collectives.progress.work import Arrived, Progress, Work
from collectives.transports.node.meeting import IN_ORDER


class Control:
    """The control messages of a Communicator, and how a collective is noted. Only as a part of it, which sets these attributes."""

    mpi: Any
    size: int
    checked: bool
    _progress: Progress
    _log: Log
    _transports: dict[str, Any]
    _on_progress: Any
    _queue: Any
    _flush: Any

    @overload
    def barrier(self, *, async_op: Literal[False] = False) -> None: ...

    @overload
    def barrier(self, *, async_op: Literal[True]) -> Work: ...

    def barrier(self, *, async_op: bool = False) -> Work | None:
        """Return when every rank has called it; with `async_op` at once, and `wait()` of the Work returns then.

        Within a node no rank has to wait for the Work: that this one has called is seen by the others without its doing.
        """
        if async_op:
            return self._issue_barrier()
        self._flush()
        with self._enter("barrier"):
            self.mpi.Barrier()
        return None

    def _issue_barrier(self) -> Work:
        self._progress.pending()  # an error on a communicator that was freed
        shared = self._transports.get("shared")
        if IN_ORDER and shared is not None and not self.checked:
            return Arrived(shared.posts.barriers, self._log.enter("barrier"))
        return self._queue(self._on_progress().barrier, "barrier")

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """The root's `obj`, on every rank. Pickled: for small control messages, never for data."""
        root = rank_of("broadcast_object", root, self.size)
        self._flush()
        with self._enter("broadcast_object", root=root):
            return self.mpi.bcast(obj, root)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Every rank's `obj` in order of rank. Pickled: for small control messages, never for data."""
        self._flush()
        with self._enter("all_gather_object"):
            return self.mpi.allgather(obj)

    def together(self, doing: str = "") -> AbstractContextManager[None]:
        """`with comm.together("reading the data"):` - an error in the block on any rank is raised on every rank.

        The same type and text on all, naming the ranks that failed, and `collectives.on_all_ranks(error)` is true of it.
        The block must hold no collective.
        """
        self._flush()
        if self.checked:
            self._enter("together").leave()  # `doing` may name a rank's own file
        return diagnosis.together(self.mpi, doing, self._log)

    def _enter(
        self,
        operation: str,
        call: str = "",
        root: int | None = None,
        op: str | None = None,
        elements: int = 0,
        dtype: str = "",
    ) -> Entry:
        """Note in the flight record that this rank enters a collective; in checked mode compare it, as `call`, with the others'."""
        entry = self._log.enter(operation, elements, dtype, op, root)
        if self.checked:
            with entry.failing():
                diagnosis.compare_calls(self.mpi, call or entry.operation.words, entry)
        return entry
