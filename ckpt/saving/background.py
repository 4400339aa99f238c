"""Saving while the training continues: a thread writes from a copy in host memory (buffers.py).

The thread calls no MPI: the ranks agree by files (board.py). `wait`, or the next save, raises an error of the thread on all ranks. A
program that calls neither ends after its saves have ended.

[Note: whose save] Several threads may save at the same time. The wait for a save of several ranks is collective, so the saves that a
rank waits for must not depend on the speed of its threads. A save over a communicator waits for the previous save over the same
communicator. `wait` waits for the saves that the calling thread began, in one order on all ranks. Only one thread gets an error.
"""

import atexit
import concurrent.futures.thread  # noqa: F401 - its hook at the end of the program is registered before ours, and so runs after it
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from ckpt.commit.atomic import end_board
from ckpt.ranks import Ranks, Solo
from ckpt.saving.board import Board
from ckpt.saving.buffers import give_back
from ckpt.storage.places import Place, absolute
from ckpt.storage.underway import known, saves

_PATIENCE_S = 0.2  # between two checks by `wait` of the ranks' progress
_HEARD_S = 10.0
_NICE = 14
"""The niceness of the thread, so that computation has priority. With all cores busy, a save of 1.2 GB by 2 ranks took 1.6 s at
niceness 8, 14 s at 14 and 46 s at 19. Steps during the save took 1.18, 1.06 and 1.01 times as long."""

_pending: "list[Pending]" = saves  # type: ignore[assignment]
_changing = threading.Lock()
_this_thread = threading.local()  # `has_begun`: whether the thread ever began a background save


class Pending:
    """A background save that runs, or whose end no `wait` has reported yet.

    A thread calls `work(ranks)` with the values in `buffer`. `folder`: the board's folder, which rank 0 has made; None for one rank.
    `places`: the checkpoint and its copies.
    """

    def __init__(
        self,
        comm: Ranks,
        folder: Path | None,
        work: Callable[[Ranks], None],
        buffer: np.ndarray,
        places: Sequence[Place],
    ) -> None:
        self.comm = comm
        self.places = {known(place) for place in places}
        self.begun_by = threading.current_thread()
        self.ranks: Board | Solo = Solo() if folder is None else Board(folder, comm.rank, comm.size)
        self.error: Exception | None = None
        self.ending = threading.Lock()
        self.thread = threading.Thread(target=self._run, args=(work, buffer), name="ckpt-save")

    def _run(self, work: Callable[[Ranks], None], buffer: np.ndarray) -> None:
        with suppress(OSError, AttributeError):  # on Linux it is the niceness of only this thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            work(self.ranks)
        except Exception as error:
            self.error = error
        finally:
            give_back(buffer)
        if self.comm.size == 1 and self.error is None:
            _forget(self)  # there is no error to report, and no other rank


def begin(
    comm: Ranks, folder: Path | None, work: Callable[[Ranks], None], buffer: np.ndarray, places: Sequence[Place]
) -> None:
    """Start a thread that calls `work` and then gives `buffer` back; `wait` waits for its end. `places`: that it writes."""
    _this_thread.has_begun = True
    pending = Pending(comm, folder, work, buffer, places)
    with _changing:
        _pending.append(pending)
    pending.thread.start()


def goes_on() -> bool:
    """Whether a background save of this rank is running; False as soon as it has ended, also before `wait`."""
    return any(pending.thread.is_alive() for pending in list(_pending))


def wait() -> None:
    """Wait for the background saves that this thread began, and raise their errors.

    Collective over the communicators of the saves: all ranks raise. A thread that began no save itself, such as one whose helper
    threads save, waits for all saves of this process. If a thread ended without a wait for its saves of one rank (`comm=None`), the
    first thread that calls this function waits for them.
    """
    for pending in sorted(_pending, key=_turn):
        if _is_ours(pending):
            _end(pending)


def wait_before(comm: Ranks) -> None:
    """Wait for the previous save over `comm`, if it still runs: see [Note: whose save]. Raises its error like `wait`."""
    for pending in list(_pending):
        if _is_before(pending, comm):
            _end(pending)


def wait_before_load(path: str | os.PathLike[str], comm: Ranks) -> None:
    """Wait for the save of `path` over `comm`, if it still runs. Raises its error like `wait`. Collective over `comm`.

    Other saves of `path` by this process are waited for where it is read (storage/underway.py): that is one long operation for the
    other ranks, while here each look is a short one.
    """
    mine = [pending for pending in list(_pending) if _is_before(pending, comm)]
    if mine:
        is_wanted = comm.broadcast_object([known(absolute(path)) in pending.places for pending in mine])
        for pending, wanted in zip(mine, is_wanted, strict=True):
            if wanted:
                _end(pending)


def abandon() -> None:
    """Give up the saves of this process, because ranks that take part in them were lost. Not collective; raises no error."""
    for pending in list(_pending):
        pending.ranks.give_up()
        pending.thread.join()
        _forget(pending)
        if pending.comm.rank == 0 and isinstance(pending.ranks, Board):
            end_board(pending.ranks.folder)


def _turn(pending: Pending) -> tuple[bool, str]:
    """The order in which all ranks wait: by the names of the boards, because the threads of a rank may begin in any order.

    Saves of one rank come last, because their errors must not keep this rank from the collective waits.
    """
    return (False, str(pending.ranks.folder)) if isinstance(pending.ranks, Board) else (True, "")


def _is_before(pending: Pending, comm: Ranks) -> bool:
    return pending.comm is comm or (comm.size == pending.comm.size == 1 and _began_here(pending))


def _began_here(pending: Pending) -> bool:
    return pending.begun_by is threading.current_thread()


def _is_ours(pending: Pending) -> bool:
    left_behind = pending.comm.size == 1 and not pending.begun_by.is_alive()
    return _began_here(pending) or left_behind or not getattr(_this_thread, "has_begun", False)


def _end(pending: Pending) -> None:
    """Wait for a save on all its ranks, and raise its error on all. If several threads call this, the first one does it."""
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
                # The other ranks read the error from the board, unless the board's folder can no longer be written.
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
    """At the end of the program: wait for the saves. Not collective: ranks may end at different times."""
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


# Runs while threads can still be started, which fsspec and the reading of a copy need: the public `atexit` comes too late.
threading._register_atexit(_finish)  # type: ignore[attr-defined]
atexit.register(_report)  # registered early, because functions registered later run before it
