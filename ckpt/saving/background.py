"""Saving while the training goes on: a thread writes the copy that was made in host memory (buffers.py).

The thread calls no MPI: the ranks agree by files (board.py). What goes wrong there is raised on all ranks by `wait`, or by the
save that comes after it. A program that ends without either ends when its saves have.

[Note: whose save] Several threads may save at the same time. To wait for a save of several ranks is collective, so what each rank waits
for must not depend on how fast its threads are: a save over a communicator waits for the one before it over the same communicator, and
`wait` for the saves that the calling thread began, in one order on all ranks. What is said to one thread is not said to another.
"""

import atexit
import concurrent.futures.thread  # noqa: F401 - its hook at the end of the program is registered before ours, and so runs after it
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from ckpt.commit.atomic import end_board
from ckpt.ranks import Ranks, Solo
from ckpt.saving.board import Board
from ckpt.saving.buffers import give_back

_PATIENCE_S = 0.2  # between two looks of `wait` at how the ranks are doing
_HEARD_S = 10.0
_NICE = 14
"""Of the thread: what computes goes first. Where steps keep all cores busy, a save of 1.2 GB by 2 ranks took 1.6 s at 8, 14 s at 14
and 46 s at 19, and the steps meanwhile 1.18, 1.06 and 1.01 times as long."""

_pending: "list[Pending]" = []
_changing = threading.Lock()
_this_thread = threading.local()  # `has_begun`: whether it ever began a save in the background


class Pending:
    """A save that goes on, or whose end no `wait` has reported yet.

    A thread does `work(ranks)` with the values in `buffer`. `folder`: of the board, made by rank 0 before; None for one rank alone.
    """

    def __init__(self, comm: Ranks, folder: Path | None, work: Callable[[Ranks], None], buffer: np.ndarray) -> None:
        self.comm = comm
        self.begun_by = threading.current_thread()
        self.ranks: Board | Solo = Solo() if folder is None else Board(folder, comm.rank, comm.size)
        self.error: Exception | None = None
        self.ending = threading.Lock()
        self.thread = threading.Thread(target=self._run, args=(work, buffer), name="ckpt-save")

    def _run(self, work: Callable[[Ranks], None], buffer: np.ndarray) -> None:
        with suppress(OSError, AttributeError):  # of this thread alone, on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            work(self.ranks)
        except Exception as error:
            self.error = error
        finally:
            give_back(buffer)
        if self.comm.size == 1 and self.error is None:
            _forget(self)  # there is no error to report, and no other rank


def begin(comm: Ranks, folder: Path | None, work: Callable[[Ranks], None], buffer: np.ndarray) -> None:
    """Let a thread do `work`, with `buffer`, which it gives back at its end; `wait` ends it."""
    _this_thread.has_begun = True
    pending = Pending(comm, folder, work, buffer)
    with _changing:
        _pending.append(pending)
    pending.thread.start()


def goes_on() -> bool:
    """Whether this rank is saving in the background at this moment; False also when that has ended and `wait` was not called yet."""
    return any(pending.thread.is_alive() for pending in list(_pending))


def wait() -> None:
    """Wait for the saves that this thread began in the background, and raise what went wrong with them.

    Collective over the communicators they were begun with: all ranks raise. A thread that began none itself, such as one that lets
    others save, waits for all of this process. Those of one rank alone (`comm=None`) that a thread left behind at its end are
    waited for by the thread that calls this first.
    """
    for pending in sorted(_pending, key=_turn):
        if _is_ours(pending):
            _end(pending)


def wait_before(comm: Ranks) -> None:
    """Wait for the save that the next one over `comm` comes after, if it goes on: see [Note: whose save]. Raises as `wait`."""
    for pending in list(_pending):
        if pending.comm is comm or (comm.size == pending.comm.size == 1 and _began_here(pending)):
            _end(pending)


def _turn(pending: Pending) -> tuple[bool, str]:
    """The order in which all ranks wait: by the boards, whose names all know. Each rank's threads may have begun in another order.

    Those of one rank alone come last: their errors must not keep this rank from the others.
    """
    return (False, str(pending.ranks.folder)) if isinstance(pending.ranks, Board) else (True, "")


def _began_here(pending: Pending) -> bool:
    return pending.begun_by is threading.current_thread()


def _is_ours(pending: Pending) -> bool:
    left_behind = pending.comm.size == 1 and not pending.begun_by.is_alive()
    return _began_here(pending) or left_behind or not getattr(_this_thread, "has_begun", False)


def _end(pending: Pending) -> None:
    """Wait for a save on all its ranks, and raise its error on all. Of several threads that call this the first does so."""
    with pending.ending:
        if pending not in _pending:
            return
        deadline = None
        while True:
            pending.thread.join(_PATIENCE_S)
            alive, failed = pending.thread.is_alive(), pending.error is not None
            states = pending.comm.all_gather_object((alive, failed))
            if not any(alive for alive, _ in states):
                break
            if any(failed for _, failed in states):
                # The others will hear of it, unless nothing can be written to the folder any more.
                deadline = deadline or time.monotonic() + _HEARD_S
                if time.monotonic() > deadline:
                    pending.ranks.give_up()
        _forget(pending)
        if pending.comm.rank == 0 and isinstance(pending.ranks, Board):
            end_board(pending.ranks.folder)
        with pending.comm.together():
            if pending.error is not None:
                raise pending.error


def _forget(pending: Pending) -> None:
    with _changing, suppress(ValueError):
        _pending.remove(pending)


def _finish() -> None:
    """At the end of the program: let the saves come to their end. Not collective: the ranks end as they like."""
    for pending in list(_pending):
        pending.thread.join()
        pending.ranks.leave()


def _report() -> None:
    """At the end of a program that did not call `wait`: print the errors of saves, and end with an exit code that is not 0."""
    failed = [pending.error for pending in _pending if pending.error is not None]
    for error in failed:
        print(f"ckpt.save in the background failed: {error}", file=sys.stderr, flush=True)
    if failed:
        os._exit(1)


# While threads still can be started: the public `atexit` comes too late for what reading back a copy and fsspec need.
threading._register_atexit(_finish)  # type: ignore[attr-defined]
atexit.register(_report)  # as early as this module: what was registered later runs before it
