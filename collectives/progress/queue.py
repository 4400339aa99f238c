"""The asynchronous operations of one communicator: how they are issued, and what of them comes before its next collective."""

from collections.abc import Callable
from threading import get_ident
from typing import Any
from weakref import ref

from collectives.progress.issued import Issues, Posted
from collectives.progress.unusable import Freed
from collectives.progress.work import Progress, Queued, Work


class AsyncQueue:
    """`progress`: what carries the operations out. Another takes its place where the communicator is freed, or gets a twin for JAX.

    `issues`: of the communicator; a Progress with a thread needs none.
    """

    def __init__(self, progress: Progress, issues: Issues | None) -> None:
        self.progress = progress
        self._issues = issues
        self._issued: ref[Queued] | None = None  # the last one that was issued here

    def issue(self, operation: Callable[[], Any], name: str) -> Work:
        """Issue `operation`, which is to be called `name`."""
        if self._issued is not None:
            self._take_over()
        work = self.progress.issue(operation, name, self._issues)
        self._issued = ref(work)
        return work

    def post(self, operation: Callable[[], Any], posted: Posted) -> Work:
        """An operation that this rank has posted, where there is no progress thread."""
        return self.progress.queue(operation, posted)

    def must_flush(self) -> bool:
        """Whether operations are left that come before a collective of this thread. ValueError if the communicator was freed."""
        return self.progress.pending() or (self._issued is not None and self._another_s() is not None)

    def flush(self) -> None:
        """Before a collective: carry out what this thread has issued, and what another has issued here and left to this one."""
        if self._issued is not None:
            self._take_over()
        self.progress.flush()

    def free(self) -> None:
        """Collective. Whatever is asked of the communicator asks `progress` first, and is an error from now on."""
        if self._issues is not None:
            self._issues.free()
        self.progress = Freed()

    @property
    def is_freed(self) -> bool:
        """Whether `free` was called."""
        return type(self.progress) is Freed  # isinstance asks an ABC: 0.1 us

    def _another_s(self) -> Queued | None:
        """The last one that was issued here, if by another thread, and not ended."""
        issued = self._issued
        work = None if issued is None else issued()
        if work is None or not work.is_left:
            self._issued = None
            return None
        return work if work.issuer != get_ident() else None

    def _take_over(self) -> None:
        if (work := self._another_s()) is not None:
            work.hand_over()
