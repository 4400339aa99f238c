"""The Work that `async_op=True` returns, and the two ways to carry out asynchronous operations, of which a job uses one.

[Note: progress] The asynchronous operations of a thread, on all communicators, form one queue in order of issue. The operations of
different threads have no order that all ranks share, so each thread has its own queue. A thread carries out an operation of another
thread only if it waits for that operation, or calls a collective on the communicator of that operation.
- `Thread`: a progress thread carries out operations while the caller computes. MPI libraries make no progress by themselves.
- `Deferred`, if no core is free for a thread: operations are carried out when the caller waits for one, or before its next collective.
  Programs give the same results both ways, but here without overlap. A `send` or `recv` in between must not wait for a collective that
  its peer has not reached. So an operation also starts an MPI_Ibarrier when it is issued. The barrier's end shows that all ranks have
  issued the operation; only then a wait for a message may carry it out (`Issues`), or a wait for an asynchronous `barrier`. A
  reduce-scatter in node memory needs no MPI_Ibarrier (`Posted`): a rank that waits for a message or calls `done()` adds up its part if
  all ranks have issued the operation.
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
from time import perf_counter
from typing import Any

from collectives.diagnosis.record import Entry
from collectives.diagnosis.stacks import inside_package, issued_here
from collectives.diagnosis.together import on_all_ranks
from collectives.environment import switch
from collectives.progress.issued import Announced, Issues
from collectives.transports.node.meeting import Meeting


class Work(ABC):
    """An asynchronous operation: `wait()` returns its result, `done()` whether it has ended.

    Its arrays stay alive until the operation has ended, even if the program has dropped the Work.
    """

    def __init__(self) -> None:
        self._result: Any = None
        self._error: BaseException | None = None
        self._ended = False
        self.is_known = False  # whether the program has seen the end, and so may use the arrays

    @abstractmethod
    def done(self) -> bool:
        """Whether the operation has ended. Without a progress thread `done` carries it out if all ranks have issued it."""

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


class Ended(Work):
    """An operation that has ended before its call returned."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._end(lambda: result)

    def done(self) -> bool:
        return True

    def _finish(self) -> None:
        raise AssertionError("an operation that has ended is not carried out")


class Arrived(Work):
    """A barrier that this rank has entered; the other ranks see this in node memory without further calls by this rank.

    While this rank waits, it carries out operations of its queue that all ranks have issued. A rank that has not come to the barrier
    may wait for one of them.
    """

    def __init__(self, meeting: Meeting, entry: Entry, progress: "Progress") -> None:
        super().__init__()
        self._progress = progress
        self._meeting, self._count, self._entry, self._site = meeting, meeting.arrive(), entry, issued_here()
        entry.issued()
        entry.leave()  # the record shows the barrier as unfinished only while the program waits for it

    def done(self) -> bool:
        self._ended = self._ended or self._meeting.is_complete(self._count)
        return self._ended

    def _finish(self) -> None:
        if not self.done():
            self._entry.wait()
            self._site.carry_out(partial(self._meeting.wait, self._count, self._progress.advance))
            self._entry.leave()
            self._ended = True


of_this_process: "weakref.WeakSet[Progress]" = weakref.WeakSet()


class Progress(ABC):
    """Carries out asynchronous operations in order of issue [Note: progress]. All communicators of a process share one."""

    on_thread: bool

    def __init__(self) -> None:
        of_this_process.add(self)
        self._carried_s = 0.0  # by progress threads
        self._waited_s = 0.0  # for them

    @property
    def hidden_s(self) -> float:
        """Seconds in which progress threads have carried out operations while no thread of the program waited for one."""
        return self._carried_s - self._waited_s

    @property
    def of_process(self) -> "Progress":
        """The Progress that all communicators of the process share; a Progress put in front of it overrides this."""
        return self

    @abstractmethod
    def issue(self, operation: Callable[[], Any], name: str, issues: Issues | None) -> "Queued":
        """Queue `operation`, a collective called `name`. `issues`: of its communicator; only `Deferred` needs them."""

    def queue(self, operation: Callable[[], Any], announced: Announced) -> "Queued":
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


class Queued(Work):
    """A queued operation. `issuer`: the ident of the thread that has issued it."""

    def __init__(self) -> None:
        super().__init__()
        self.issuer = threading.get_ident()

    @property
    def is_left(self) -> bool:
        """Whether the operation has not ended. Unlike `done`, this never carries it out."""
        return not self._ended

    @abstractmethod
    def hand_over(self) -> None:
        """Called when another thread uses the communicator: end this operation first, unless its own thread is in a call (an error)."""


class _Deferred(Queued):
    def __init__(self, queue: "_Queue", operation: Callable[[], Any], announced: Announced) -> None:
        super().__init__()
        self._queue, self._operation, self.announced = queue, operation, announced

    def done(self) -> bool:
        if not self._ended:
            self._queue.progress.pending()  # raises in a forked child
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
        # Closed after the operation, so that the record shows it while it waits for other ranks.
        self.announced.close(self._error)
        del self._operation


class _Queue:
    """The operations of one thread. If another thread waits for one of these Works, it carries them out up to that Work."""

    def __init__(self, progress: "Deferred") -> None:
        self.progress = progress
        self._works: deque[_Deferred] = deque()
        self._lock = threading.RLock()
        self.carrier = 0  # the ident of the thread that carries out an operation now

    def add(self, work: _Deferred) -> None:
        self.progress.count(1)
        self._works.append(work)

    def pending(self) -> bool:
        """Whether operations are left. False for the thread that carries one out: otherwise that operation would flush the queue."""
        return self.carrier != threading.get_ident() if self.carrier else bool(self._works)

    def next(self) -> _Deferred | None:
        """Wait until no other thread carries out operations of this queue, then carry out the first one that is left, if any."""
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
        """Carry out the first operation if all ranks have issued it."""
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
    """Carries out operations in the caller's thread when it waits."""

    on_thread = False

    def __init__(self) -> None:
        super().__init__()
        self._queues: dict[int, _Queue] = {}  # by thread
        self._num_left = 0  # operations in all queues
        self.carriers: set[int] = set()  # the threads that carry out an operation now, of any queue
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
        """Add `more` to the number of operations that are left."""
        with self._counting:
            self._num_left += more

    def pending(self) -> bool:
        if not self._num_left or threading.get_ident() in self.carriers:  # fast, as each call asks
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
                raise work._error  # here, not in `wait`: other ranks may have raised it instead of this call's collective

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
        # `pending` is always false here, but raises in a forked child
        self.is_known = self._ended or self._progress.pending()
        return self.is_known

    def _finish(self) -> None:
        self._progress.pending()
        began = perf_counter()
        self._event.wait()
        self._progress._waited_s += perf_counter() - began

    def hand_over(self) -> None:
        if not inside_package(self.issuer):
            self._finish()

    def carry_out(self) -> None:
        self._end(self._counted)
        self._event.set()

    def _counted(self) -> Any:
        # All within the operation: a thread that finds it ended must find its time counted and its arrays given back.
        began = perf_counter()
        try:
            return self._operation()
        finally:
            self._progress._carried_s += perf_counter() - began
            del self._operation


_Line = queue.SimpleQueue[_Threaded | None]


class Thread(Progress):
    """Carries out operations on progress threads, one for each thread that issues operations, on separate communicators."""

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
        """Start the progress thread for the calling thread."""
        line: _Line = queue.SimpleQueue()
        thread = threading.Thread(target=self._run, args=(line,), name="collectives-progress", daemon=True)
        self._lines[threading.get_ident()] = line, thread
        thread.start()
        return line, thread

    def flush(self) -> None:
        """Do nothing: the progress thread uses other MPI communicators than the caller."""

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
            del work  # drop the reference before the next `get` waits


def choose_progress(mpi: Any, threads_allowed: bool, checked: bool) -> Progress:
    """A progress thread if MPITRAIN_PROGRESS_THREAD=1; without that setting, if every rank has two cores or more. Collective.

    In checked mode only if it is 1: progress threads use separate communicators, so a rank that passes async_op and a rank that does
    not would never compare their calls.
    """
    chosen = switch("MPITRAIN_PROGRESS_THREAD")
    # A rank shares its cores with all ranks of the node that are bound to the same set of cores.
    cores = tuple(sorted(os.sched_getaffinity(0)))
    sharing = mpi.allgather((os.uname().nodename, cores, chosen)).count((os.uname().nodename, cores, chosen))
    wanted = not checked and len(cores) >= 2 * sharing if chosen is None else chosen
    return Thread() if all(mpi.allgather(wanted and threads_allowed)) else Deferred()
