"""Asynchronous operations on progress threads, while the caller computes [Note: progress]."""

import queue
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any

from collectives.diagnosis.stacks import inside_package
from collectives.progress.issued import Issues
from collectives.progress.progress import Progress
from collectives.progress.work import Queued


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
        self._progress.waited_s += perf_counter() - began

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
            self._progress.carried_s += perf_counter() - began
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
