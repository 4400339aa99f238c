"""The asynchronous operations of one communicator: issues them, and carries them out before its next collective if necessary."""

from collections.abc import Callable
from threading import get_ident
from typing import Any
from weakref import ref

from collectives.progress.issued import Issues, Posted
from collectives.progress.progress import Progress
from collectives.progress.unusable import Freed
from collectives.progress.work import Queued, Work


class AsyncQueue:
    """`progress`: carries out the operations; it is replaced when the communicator is freed or gets a communicator for JAX.

    `issues`: the Issues of the communicator; None for a Progress with a thread.
    """

    def __init__(self, progress: Progress, issues: Issues | None) -> None:
        self.progress = progress
        self._issues = issues
        self._issued: ref[Queued] | None = None  # the last operation issued here

    def issue(self, operation: Callable[[], Any], name: str) -> Work:
        """Issue `operation`; the flight record calls it `name`."""
        if self._issued is not None:
            self._take_over()
        work = self.progress.issue(operation, name, self._issues)
        self._issued = ref(work)
        return work

    def post(self, operation: Callable[[], Any], posted: Posted) -> Work:
        """Queue an operation that this rank has posted. Only without a progress thread."""
        return self.progress.queue(operation, posted)

    def must_flush(self) -> bool:
        """Whether operations must be carried out before a collective of this thread. ValueError if the communicator was freed."""
        return self.progress.pending() or (self._issued is not None and self._another_s() is not None)

    def flush(self) -> None:
        """Before a collective: carry out this thread's operations, and those that another thread has issued on the communicator."""
        if self._issued is not None:
            self._take_over()
        self.progress.flush()

    def free(self) -> None:
        """Collective. Each later operation of the communicator calls `progress` first, which then raises."""
        if self._issues is not None:
            self._issues.free()
        self.progress = Freed()

    @property
    def is_freed(self) -> bool:
        """Whether `free` was called."""
        return type(self.progress) is Freed  # isinstance with an ABC takes 0.1 us

    def _another_s(self) -> Queued | None:
        """The last operation issued here if it has not ended and another thread has issued it."""
        issued = self._issued
        work = None if issued is None else issued()
        if work is None or not work.is_left:
            self._issued = None
            return None
        return work if work.issuer != get_ident() else None

    def _take_over(self) -> None:
        if (work := self._another_s()) is not None:
            work.hand_over()
