"""Operations in flight: what `async_op=True` returns, and the two ways, of which a job takes one, to carry such operations out.

[Note: progress] The asynchronous operations of a thread form one queue in order of issue, whatever their communicators. Those of
several threads have no order that all ranks share, so each thread has a queue of its own, and no thread carries out what another has
issued, unless it waits for that, or takes over the communicator on which that was issued.
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

from collectives.diagnosis.record import Entry
from collectives.diagnosis.stacks import inside_package, issued_here
from collectives.diagnosis.together import on_all_ranks
from collectives.environment import switch
from collectives.progress.issued import Announced, Issues
from collectives.transports.node.meeting import Meeting


class Work(ABC):
    """An operation in flight: `wait()` gives its result, `done()` tells whether it has ended.

    Its arrays stay alive until it has ended, also if the program has dropped the Work.
    """

    def __init__(self) -> None:
        self._result: Any = None
        self._error: BaseException | None = None
        self._ended = False
        self.is_known = False  # to the program, which may use its arrays from then on

    @abstractmethod
    def done(self) -> bool:
        """Whether the operation has ended. Without a progress thread it is carried out here, once all ranks have issued it."""

    @abstractmethod
    def _finish(self) -> None: ...

    def wait(self) -> Any:
        """Block until the operation has ended and return its result. Its errors are raised here. Idempotent."""
        if not self._ended:
            self._finish()
        self.is_known = True
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
        entry.leave()  # unless the program waits

    def done(self) -> bool:
        self._ended = self._ended or self._meeting.is_complete(self._count)
        return self._ended

    def _finish(self) -> None:
        if not self.done():
            self._entry.wait()
            self._site.carry_out(partial(self._meeting.wait, self._count))
            self._entry.leave()
            self._ended = True


of_this_process: "weakref.WeakSet[Progress]" = weakref.WeakSet()


class Progress(ABC):
    """Carries out asynchronous operations in the order of issue [Note: progress]. A process has one."""

    on_thread: bool

    def __init__(self) -> None:
        of_this_process.add(self)

    @property
    def of_process(self) -> "Progress":
        """The one that a process has, which all its communicators share."""
        return self

    @abstractmethod
    def issue(self, operation: Callable[[], Any], name: str, issues: Issues | None) -> "Queued":
        """Queue `operation`, a collective of the communicator of `issues`, which only `Deferred` needs. `name`: what it is."""

    def queue(self, operation: Callable[[], Any], announced: Announced) -> "Queued":
        """Queue `operation`, which this rank has announced. For a Progress without a thread."""
        raise NotImplementedError

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


class Queued(Work):
    """An operation that `issuer`, the thread of that ident, has put into a queue."""

    def __init__(self) -> None:
        super().__init__()
        self.issuer = threading.get_ident()

    @property
    def is_left(self) -> bool:
        """Whether it has not ended. Unlike `done`, this carries nothing out."""
        return not self._ended

    @abstractmethod
    def hand_over(self) -> None:
        """Another thread goes on with its communicator: carry it out before, unless the two are there at once, which is refused."""


class _Deferred(Queued):
    def __init__(self, queue: "_Queue", operation: Callable[[], Any], announced: Announced) -> None:
        super().__init__()
        self._queue, self._operation, self.announced = queue, operation, announced

    def done(self) -> bool:
        if not self._ended:
            self._queue.progress.pending()  # an error in a forked child
            self._queue.advance()
        self.is_known = self._ended
        return self._ended

    def _finish(self) -> None:
        self._queue.progress.pending()
        while not self._ended:
            self._queue.next()

    def hand_over(self) -> None:
        if not self._queue.carrier:
            self._finish()

    def carry_out(self) -> None:
        self._end(self._operation)
        # Not before: while it waits for other ranks, the record is to show the operation.
        self.announced.close(self._error)
        del self._operation


class _Queue:
    """The operations that one thread has issued. Another thread that waits for one of these Works carries them out up to that Work."""

    def __init__(self, progress: "Deferred") -> None:
        self.progress = progress
        self._works: deque[_Deferred] = deque()
        self._lock = threading.RLock()
        self.carrier = 0  # the thread that carries one out

    def add(self, work: _Deferred) -> None:
        self.progress.count(1)
        self._works.append(work)

    def pending(self) -> bool:
        """Whether operations are left. Not to the thread that carries one out: that is itself a collective, and would flush."""
        return self.carrier != threading.get_ident() if self.carrier else bool(self._works)

    def next(self) -> _Deferred | None:
        """Carry out the first one, if any is left when no other thread is about it."""
        with self._lock:
            if not self._works:
                return None
            self.carrier = me = threading.get_ident()
            self.progress.carriers.add(me)
            try:
                work = self._works.popleft()
                work.carry_out()
            finally:
                self.progress.carriers.discard(me)
                self.carrier = 0
                self.progress.count(-1)
            return work

    def advance(self) -> None:
        """Carry out the first one if all ranks have issued it."""
        if self.pending() and self._lock.acquire(blocking=False):
            try:
                if self._works and self._works[0].announced.by_all():
                    self.next()
            finally:
                self._lock.release()

    def drain(self) -> None:
        while self.pending():
            self.next()


class Deferred(Progress):
    """Operations are carried out by the caller's thread when it waits."""

    on_thread = False

    def __init__(self) -> None:
        super().__init__()
        self._queues: dict[int, _Queue] = {}  # by thread
        self._num_left = 0  # in all of them
        self.carriers: set[int] = set()  # the threads that carry one out, perhaps another thread's
        self._counting = threading.Lock()

    def issue(self, operation: Callable[[], Any], name: str, issues: Issues | None) -> Queued:
        assert issues is not None
        return self.queue(operation, issues.announce(name))

    def queue(self, operation: Callable[[], Any], announced: Announced) -> Queued:
        queue = self._of_this_thread() or self._queues.setdefault(threading.get_ident(), _Queue(self))
        work = _Deferred(queue, operation, announced)
        queue.add(work)
        return work

    def count(self, more: int) -> None:
        """So many operations more are left."""
        with self._counting:
            self._num_left += more

    def pending(self) -> bool:
        if not self._num_left or threading.get_ident() in self.carriers:  # each call asks
            return False
        queue = self._of_this_thread()
        return queue is not None and queue.pending()

    def advance(self) -> None:
        if self.pending() and (queue := self._of_this_thread()) is not None:
            queue.advance()

    def flush(self) -> None:
        queue = self._of_this_thread()
        while queue is not None and self.pending():
            work = queue.next()
            if work is not None and work._error is not None and on_all_ranks(work._error):
                raise work._error  # now, not at `wait`: the others may have raised it in this call's place, and not come to it

    def drain(self) -> None:
        for each in tuple(self._queues.values()):
            each.drain()

    def close(self) -> None:
        self.drain()

    def _of_this_thread(self) -> _Queue | None:
        return self._queues.get(threading.get_ident())


class _Threaded(Queued):
    def __init__(self, progress: Progress, operation: Callable[[], Any]) -> None:
        super().__init__()
        self._progress, self._operation = progress, operation
        self._event = threading.Event()

    def done(self) -> bool:
        # `pending` is never true here: it is an error in a forked child
        self.is_known = self._event.is_set() or self._progress.pending()
        return self.is_known

    def _finish(self) -> None:
        self._progress.pending()
        self._event.wait()

    def hand_over(self) -> None:
        if not inside_package(self.issuer):
            self._finish()

    def carry_out(self) -> None:
        self._end(self._operation)
        del self._operation
        self._event.set()


_Line = queue.SimpleQueue[_Threaded | None]


class Thread(Progress):
    """Operations are carried out by a thread of their own, one for each thread that issues some, on communicators of their own."""

    on_thread = True

    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[int, tuple[_Line, threading.Thread]] = {}  # by the thread that issues

    def issue(self, operation: Callable[[], Any], name: str, issues: Issues | None) -> Queued:
        line, _ = self._lines.get(threading.get_ident()) or self._begin()
        work = _Threaded(self, operation)
        line.put(work)
        return work

    def _begin(self) -> "tuple[_Line, threading.Thread]":
        """Start the thread that carries out the operations of this thread."""
        line: _Line = queue.SimpleQueue()
        thread = threading.Thread(target=self._run, args=(line,), name="collectives-progress", daemon=True)
        self._lines[threading.get_ident()] = line, thread
        thread.start()
        return line, thread

    def flush(self) -> None:
        """Nothing: the thread's communicators are not the caller's."""

    def drain(self) -> None:
        for line, thread in tuple(self._lines.values()):
            if thread is not threading.current_thread():
                last = _Threaded(self, lambda: None)
                line.put(last)
                last.wait()

    def close(self) -> None:
        for line, thread in tuple(self._lines.values()):
            line.put(None)
            thread.join()

    def _run(self, line: "_Line") -> None:
        while (work := line.get()) is not None:
            work.carry_out()
            del work  # the last reference, if the program has dropped the Work


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
