"""What carries out asynchronous operations. There are two ways, of which a job uses one.

[Note: progress] The asynchronous operations of a thread, on all communicators, form one queue in order of issue. The operations of
different threads have no order that all ranks share, so each thread has its own queue. A thread carries out an operation of another
thread only if it waits for that operation, or calls a collective on the communicator of that operation.
- `Thread` (on_thread.py): a progress thread carries out operations while the caller computes. MPI libraries make no progress by
  themselves.
- `Deferred` (deferred.py), if no core is free for a thread: operations are carried out when the caller waits for one, or before its
  next collective. Programs give the same results both ways, but here without overlap. A `send` or `recv` in between must not wait for a
  collective that its peer has not reached. So an operation also starts an MPI_Ibarrier when it is issued. The barrier's end shows that
  all ranks have issued the operation; only then a wait for a message may carry it out (`Issues`), or a wait for an asynchronous
  `barrier`. A reduce-scatter in node memory needs no MPI_Ibarrier (`Posted`): a rank that waits for a message or calls `done()` adds up
  its part if all ranks have issued the operation.
The rule for both: ranks issue their collectives in the same order, also those of different communicators that have ranks in common.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from collectives.progress.issued import Announced, Issues
from collectives.progress.work import Queued

of_this_process: "weakref.WeakSet[Progress]" = weakref.WeakSet()


class Progress(ABC):
    """Carries out asynchronous operations in order of issue [Note: progress]. All communicators of a process share one."""

    on_thread: bool

    def __init__(self) -> None:
        of_this_process.add(self)
        self.carried_s = 0.0  # by progress threads
        self.waited_s = 0.0  # for them

    @property
    def hidden_s(self) -> float:
        """Seconds in which progress threads have carried out operations while no thread of the program waited for one."""
        return self.carried_s - self.waited_s

    @property
    def of_process(self) -> "Progress":
        """The Progress that all communicators of the process share; a Progress put in front of it overrides this."""
        return self

    @abstractmethod
    def issue(self, operation: Callable[[], Any], name: str, issues: Issues | None) -> Queued:
        """Queue `operation`, a collective called `name`. `issues`: of its communicator; only `Deferred` needs them."""

    def queue(self, operation: Callable[[], Any], announced: Announced) -> Queued:
        """Queue `operation`, which this rank has announced. For a Progress without a thread."""
        raise NotImplementedError

    @abstractmethod
    def flush(self) -> None:
        """Before a collective of the caller: carry out the operations that must come before it."""

    @abstractmethod
    def drain(self) -> None:
        """Before a communicator is freed: wait until all issued operations have ended."""

    def pending(self) -> bool:
        """Whether this thread has operations that it must carry out itself."""
        return False

    def advance(self) -> None:  # noqa: B027
        """While waiting for a message: carry out the next operation if all ranks have issued it."""

    @abstractmethod
    def close(self) -> None:
        """At the end of the process: carry out all remaining operations, and end."""
