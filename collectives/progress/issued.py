"""Operations that this rank has issued and will carry out later, in `work.Deferred`: whether all ranks have issued them too."""

from abc import ABC, abstractmethod
from typing import Any

from collectives.diagnosis.record import ENDED, FAILED, Entry, Log
from collectives.diagnosis.stacks import issued_here
from collectives.transports.node.posted import Post


class Issues:
    """Tells of each asynchronous operation of a communicator when all its ranks have issued it [Note: progress] of work.py.

    By barriers on a clone: on the communicator itself they would be taken for collectives of ranks that issue none, since they call
    the operation without async_op. `log`: of the clone.
    """

    def __init__(self, mpi: Any, log: Log, *, checked: bool) -> None:
        """Collective. `checked`: the ranks compare what they issue."""
        self._mpi, self._log, self._checked = mpi.Dup(), log, checked

    def announce(self, name: str) -> "Announced":
        """This rank issues the operation `name`."""
        return _Announced(self._log, name, self._mpi.Ibarrier(), self._checked)

    def free(self) -> None:
        """Collective."""
        self._mpi.Free()


class Announced(ABC):
    """An operation that this rank has issued, and which `Deferred` will carry out."""

    @abstractmethod
    def by_all(self) -> bool:
        """Whether it can be carried out now, without waiting for a rank that has not issued it."""

    @abstractmethod
    def close(self, error: BaseException | None) -> None:
        """After the operation."""


class Posted(Announced):
    """An operation whose ranks need not come together (transports/node/posted.py): looking is what carries it on.

    `entry`: in the record.
    """

    def __init__(self, post: Post, entry: Entry) -> None:
        self._post, self._entry, self._site = post, entry, issued_here()
        entry.issued()

    def by_all(self) -> bool:
        return self._post.step()

    def finish(self) -> None:
        """Carry it out."""
        self._entry.wait()
        self._site.carry_out(self._post.finish)

    def close(self, error: BaseException | None) -> None:
        self._entry.leave(ENDED if error is None else FAILED)


class _Announced(Announced):
    """An operation that needs all ranks at the same time; the end of a barrier shows that all ranks have issued it."""

    def __init__(self, log: Log, name: str, request: Any, checked: bool) -> None:
        self._entry, self._request, self._checked, self._site = log.enter(name), request, checked, issued_here()
        self._entry.issued()

    def by_all(self) -> bool:
        return bool(self._request.Test())

    def close(self, error: BaseException | None) -> None:
        """Wait for the other ranks' words.

        Not after an error, nor where the ranks have compared their calls: another rank may have called it without async_op, and issue
        nothing. Without a comparison that rank is waited for here, so that the deadline reports it.
        """
        if error is None and not self._checked and not self.by_all():
            self._entry.wait()
            self._site.carry_out(self._request.Wait)
        self._entry.leave(ENDED if error is None else FAILED)
