"""Finds out whether all ranks have issued an operation that this rank has issued and `work.Deferred` will carry out later."""

from abc import ABC, abstractmethod
from typing import Any

from collectives.diagnosis.job import keep
from collectives.diagnosis.record import ENDED, FAILED, Entry, Log
from collectives.diagnosis.stacks import issued_here
from collectives.transports.node.posted import Post


class Issues:
    """Announces each asynchronous operation of a communicator to its ranks by a barrier: see [Note: progress] in progress.py.

    The barriers use a clone of the communicator: a rank that calls the operation without async_op starts no barrier, and on the
    communicator itself its next collective would match the barrier of the other ranks. `log`: of the clone.
    """

    def __init__(self, mpi: Any, log: Log, *, checked: bool) -> None:
        """Collective. `checked`: checked mode, in which the ranks compare their calls."""
        self._mpi, self._log, self._checked = keep(mpi.Dup()), log, checked

    def announce(self, name: str) -> "Announced":
        """Announce that this rank has issued the operation `name`."""
        return _Announced(self._log, name, self._mpi.Ibarrier(), self._checked)

    def free(self) -> None:
        """Collective."""
        self._mpi.Free()


class Announced(ABC):
    """An operation that this rank has issued and `Deferred` will carry out."""

    @abstractmethod
    def by_all(self) -> bool:
        """Whether all ranks have issued the operation, so that it can be carried out without a wait for one that has not."""

    @abstractmethod
    def close(self, error: BaseException | None) -> None:
        """Called after the operation, with its error."""


class Posted(Announced):
    """A posted operation (transports/node/posted.py), which needs no meeting: each call of `by_all` makes progress.

    `entry`: its entry in the flight record.
    """

    def __init__(self, post: Post, entry: Entry) -> None:
        self._post, self._entry, self._site = post, entry, issued_here()
        entry.issued()

    def by_all(self) -> bool:
        return self._post.step()

    def finish(self) -> None:
        """Carry out the operation."""
        self._entry.wait()
        self._site.carry_out(self._post.finish)

    def close(self, error: BaseException | None) -> None:
        self._entry.leave(ENDED if error is None else FAILED)


class _Announced(Announced):
    """An operation that needs all ranks at the same time. When its barrier has ended, all ranks have issued the operation."""

    def __init__(self, log: Log, name: str, request: Any, checked: bool) -> None:
        self._entry, self._request, self._checked, self._site = log.enter(name), request, checked, issued_here()
        self._entry.issued()

    def by_all(self) -> bool:
        return bool(self._request.Test())

    def close(self, error: BaseException | None) -> None:
        """Wait for the end of the barrier, unless the operation has failed or the ranks are in checked mode.

        A rank that called the operation without async_op never enters the barrier. Checked mode has reported that rank; without
        checked mode this rank waits here for it, until the deadline reports it.
        """
        if error is None and not self._checked and not self.by_all():
            self._entry.wait()
            self._site.carry_out(self._request.Wait)
        self._entry.leave(ENDED if error is None else FAILED)
