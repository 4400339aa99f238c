"""Operations in flight: what `async_op=True` returns, and the two ways, of which a job takes one, to carry such operations out.

[Note: progress] Asynchronous operations of a process form one queue in order of issue, whatever their communicators.
- `Thread`: a progress thread carries them out while the caller computes. MPI libraries make no progress by themselves.
- `Deferred`, where no core is free for that: they are carried out when the caller waits for one, or before its next collective. The
  same program is right on both, only not overlapped. A `send` or `recv` in between must not wait for a collective that its peer has
  not come to yet: so issuing also starts an MPI_Ibarrier, whose end says that all ranks have issued the operation, and only then is
  it carried out while waiting for a message (`Issues`). A reduce-scatter in node memory does without (`Posted`): whenever a rank waits
  for a message or asks whether it is done, it adds up its part if all have issued it, and no rank has to wait for another to do so.
The rule for both: ranks issue their collectives in the same order, also those of different communicators that have ranks in common.
"""

import os
import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from collectives.diagnosis.record import ENDED, FAILED, Entry, Log
from collectives.diagnosis.stacks import issued_here
from collectives.diagnosis.together import on_all_ranks
from collectives.environment import switch
from collectives.transports.meeting import Meeting
from collectives.transports.posted import Post


class Work(ABC):
    """An operation in flight: `wait()` gives its result, `done()` tells whether it has ended.

    Its arrays stay alive until it has ended, also where nobody holds the Work.
    """

    def __init__(self) -> None:
        self._result: Any = None
        self._error: BaseException | None = None
        self._ended = False

    @abstractmethod
    def done(self) -> bool:
        """Whether the operation has ended. Without a progress thread it is carried out here, once all ranks have issued it."""

    @abstractmethod
    def _finish(self) -> None: ...

    def wait(self) -> Any:
        """Block until the operation has ended and return its result. Its errors are raised here. Idempotent."""
        if not self._ended:
            self._finish()
        if self._error is not None:
            raise self._error
        return self._result

    def _end(self, operation: Callable[[], Any]) -> None:
        try:
            self._result = operation()
        except BaseException as error:
            self._error = error
        self._ended = True


class Arrived(Work):
    """A barrier that this rank has come to, where the others see that without its doing."""

    def __init__(self, meeting: Meeting, entry: Entry) -> None:
        super().__init__()
        self._meeting, self._count, self._entry, self._site = meeting, meeting.arrive(), entry, issued_here()
        entry.leave()  # unless somebody waits

    def done(self) -> bool:
        self._ended = self._ended or self._meeting.is_complete(self._count)
        return self._ended

    def _finish(self) -> None:
        if not self.done():
            self._entry.wait()
            self._site.carry_out(partial(self._meeting.wait, self._count))
            self._entry.leave()
            self._ended = True


class Progress(ABC):
    """Carries out asynchronous operations in the order in which they were issued [Note: progress]. One a process."""

    on_thread: bool

    def __init__(self) -> None:
        _of_this_process.add(self)

    @abstractmethod
    def issue(self, operation: Callable[[], Any], name: str, issues: "Issues | None") -> Work:
        """Queue `operation`, a collective of the communicator of `issues`, which only `Deferred` needs. `name`: what it is."""

    @abstractmethod
    def flush(self) -> None:
        """Before a collective of the caller's own: carry out what must come before it."""

    @abstractmethod
    def drain(self) -> None:
        """Before a communicator is freed: wait until all that was issued has ended."""

    def pending(self) -> bool:
        """Whether operations are left that only this thread can carry out."""
        return False

    def advance(self) -> None:  # noqa: B027
        """While waiting for a message: carry out the next operation if all ranks have issued it."""

    @abstractmethod
    def close(self) -> None:
        """Carry out all that is left, and end. For the end of the process."""


class Issues:
    """Tells of each asynchronous operation of a communicator when all its ranks have issued it [Note: progress].

    By barriers on a clone: on the communicator itself they would be taken for collectives of ranks that issue none, since they call
    the operation without async_op. `log`: of the clone.
    """

    def __init__(self, mpi: Any, log: Log, *, checked: bool) -> None:
        """Collective. `checked`: the ranks compare what they issue."""
        self._mpi, self._log, self._checked = mpi.Dup(), log, checked

    def announce(self, name: str) -> "_Announced":
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
    """An operation whose ranks need not come together (transports/posted.py): looking is what carries it on. `entry`: in the record."""

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
    """One that ranks come together for; a barrier tells that all have issued it."""

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


class _Deferred(Work):
    def __init__(self, progress: "Deferred", operation: Callable[[], Any], announced: Announced) -> None:
        super().__init__()
        self._progress, self._operation, self._announced = progress, operation, announced

    def done(self) -> bool:
        if not self._ended:
            self._progress.advance()
        return self._ended

    def _finish(self) -> None:
        self._progress.finish(self)

    def is_ready(self) -> bool:
        return self._announced.by_all()

    def carry_out(self) -> None:
        self._end(self._operation)
        self._announced.close(
            self._error
        )  # not before: while it waits for other ranks, the record is to show the operation
        del self._operation


class Deferred(Progress):
    """Operations are carried out by the caller's thread when it waits."""

    on_thread = False

    def __init__(self) -> None:
        super().__init__()
        self._queue: deque[_Deferred] = deque()
        self._busy = False

    def issue(self, operation: Callable[[], Any], name: str, issues: Issues | None) -> Work:
        assert issues is not None
        return self.queue(operation, issues.announce(name))

    def queue(self, operation: Callable[[], Any], announced: Announced) -> Work:
        """An operation that this rank has announced."""
        work = _Deferred(self, operation, announced)
        self._queue.append(work)
        return work

    def pending(self) -> bool:
        return bool(self._queue) and not self._busy

    def advance(self) -> None:
        if self.pending() and self._queue[0].is_ready():
            self._next()

    def finish(self, work: Work) -> None:
        while not work._ended:
            self._next()

    def flush(self) -> None:
        while self._queue and not self._busy:
            work = self._queue[0]
            self._next()
            if work._error is not None and on_all_ranks(work._error):
                raise work._error  # now, not at `wait`: the others may have raised it in this call's place, and not come to it

    def drain(self) -> None:
        while self._queue and not self._busy:
            self._next()

    def close(self) -> None:
        self.drain()

    def _next(self) -> None:
        self._busy = True  # what is carried out now is itself a collective, and would flush
        try:
            self._queue.popleft().carry_out()
        finally:
            self._busy = False


class _Threaded(Work):
    def __init__(self, progress: Progress, operation: Callable[[], Any]) -> None:
        super().__init__()
        self._progress, self._operation = progress, operation
        self._event = threading.Event()

    def done(self) -> bool:
        return self._event.is_set() or self._progress.pending()  # which is never so, and an error in a forked child

    def _finish(self) -> None:
        self._progress.pending()
        self._event.wait()

    def carry_out(self) -> None:
        self._end(self._operation)
        del self._operation
        self._event.set()


class Thread(Progress):
    """Operations are carried out by a thread of their own, on communicators of its own."""

    on_thread = True

    def __init__(self) -> None:
        super().__init__()
        self._queue: queue.SimpleQueue[_Threaded | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def issue(self, operation: Callable[[], Any], name: str, issues: Issues | None) -> Work:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="collectives-progress", daemon=True)
            self._thread.start()
        work = _Threaded(self, operation)
        self._queue.put(work)
        return work

    def flush(self) -> None:
        """Nothing: the thread's communicators are not the caller's."""

    def drain(self) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            last = _Threaded(self, lambda: None)
            self._queue.put(last)
            last.wait()

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work.carry_out()


class Freed(Progress):
    """Of a communicator that was freed: whatever is asked of it asks this first."""

    on_thread = False

    def pending(self) -> bool:
        raise ValueError("this communicator was freed; make another one by world(), split() or Mesh")

    def issue(self, operation: Callable[[], Any], name: str, issues: Issues | None) -> Work:
        raise ValueError(f"this communicator was freed, and {name} asked of it")

    def flush(self) -> None:
        self.pending()

    def drain(self) -> None:
        self.pending()

    def close(self) -> None:
        self.pending()


class Forked(Freed):
    """Of all communicators in a child process that a rank has forked, where each call would wait for ever or harm the parent's."""

    def pending(self) -> bool:
        raise RuntimeError(
            "a forked child cannot use its parent's communicator; start a new process (multiprocessing's spawn, subprocess), or leave "
            "communication to the parent"
        )

    def issue(self, operation: Callable[[], Any], name: str, issues: Issues | None) -> Work:
        self.pending()
        raise AssertionError

    def advance(self) -> None:
        self.pending()

    def finish(self, work: Work) -> None:
        """Of a Work that the parent's queue holds."""
        self.pending()

    def close(self) -> None:
        """Nothing: at the end of a child there is nothing to carry out."""


_of_this_process: weakref.WeakSet[Progress] = weakref.WeakSet()


def _forked() -> None:
    """In a child. Each call asks its Progress first, also one that has a plan: so nothing else need know of it."""
    for progress in _of_this_process:
        progress.__class__ = Forked


os.register_at_fork(after_in_child=_forked)


def choose_progress(mpi: Any, threads_allowed: bool, checked: bool) -> Progress:
    """A progress thread if MPITRAIN_PROGRESS_THREAD=1, or unless it is 0 where every rank has two cores or more. Collective.

    In checked mode only if it is 1: the thread has communicators of its own, so that ranks of which some pass async_op and some do not
    would not meet to compare their calls.
    """
    chosen = switch("MPITRAIN_PROGRESS_THREAD")
    # Ranks that are bound to cores of their own share no set of cores; others share theirs with all that have the same set.
    cores = tuple(sorted(os.sched_getaffinity(0)))
    sharing = mpi.allgather((os.uname().nodename, cores, chosen)).count((os.uname().nodename, cores, chosen))
    wanted = not checked and len(cores) >= 2 * sharing if chosen is None else chosen
    return Thread() if all(mpi.allgather(wanted and threads_allowed)) else Deferred()
