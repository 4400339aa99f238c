"""Asynchronous operations without a progress thread: the caller carries them out when it waits [Note: progress]."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from collectives.diagnosis.together import on_all_ranks
from collectives.progress.issued import Announced, Issues
from collectives.progress.progress import Progress
from collectives.progress.work import Queued


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
