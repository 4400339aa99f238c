"""Saving while the training goes on: a copy in host memory, and a thread that writes it.

One save at a time, from one buffer that is kept. The thread calls no MPI: the ranks agree by files (board.py). What goes wrong there
is raised on all ranks by `wait`, which the next save calls first. A program that ends without either ends when the save has.
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

from ckpt.board import Board
from ckpt.commit import take_away
from ckpt.ranks import Ranks
from ckpt.tensors import Local

_ALIGNMENT = 64
_PATIENCE_S = 0.2  # between two looks of `wait` at how the ranks are doing
_HEARD_S = 10.0
_NICE = 14
"""Of the thread: what computes goes first. Where steps keep all cores busy, a save of 1.2 GB by 2 ranks took 1.6 s at 8, 14 s at 14
and 46 s at 19, and the steps meanwhile 1.18, 1.06 and 1.01 times as long."""

_buffer = np.empty(0, np.uint8)
_pending: "Pending | None" = None


class Pending:
    """A save that goes on. `work(board)` is done by a thread; `folder`: of the board, made by rank 0 before."""

    def __init__(self, comm: Ranks, folder: Path, work: Callable[[Ranks], None]) -> None:
        self.comm = comm
        self.board = Board(folder, comm.rank, comm.size)
        self.error: Exception | None = None
        self._work = work
        self.thread = threading.Thread(target=self._run, name="ckpt-save")
        self.thread.start()

    def _run(self) -> None:
        with suppress(OSError, AttributeError):  # of this thread alone, on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            self._work(self.board)
        except Exception as error:
            self.error = error


def begin(comm: Ranks, folder: Path, work: Callable[[Ranks], None]) -> None:
    """Let a thread do `work`; `wait` ends it."""
    global _pending
    assert _pending is None
    _pending = Pending(comm, folder, work)


def goes_on() -> bool:
    """Whether this rank is saving in the background at this moment; False also when that has ended and `wait` was not called yet."""
    return _pending is not None and _pending.thread.is_alive()


def wait() -> None:
    """Wait for the save that goes on in the background, if one does. Collective over the communicator it was begun with.

    Raises what went wrong with it, on all ranks.
    """
    global _pending
    if _pending is None:
        return
    pending = _pending
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
                pending.board.give_up()
    _pending = None
    if pending.comm.rank == 0:
        take_away(pending.board.folder)
    with pending.comm.together():
        if pending.error is not None:
            raise pending.error


def _finish() -> None:
    """At the end of the program: let the save come to its end. Not collective: the ranks end as they like."""
    if _pending is not None:
        _pending.thread.join()
        _pending.board.leave()


def _report() -> None:
    """Nobody asked how the save went: if it failed, say so, and let the exit code say so."""
    if _pending is not None and _pending.error is not None:
        print(f"ckpt.save in the background failed: {_pending.error}", file=sys.stderr, flush=True)
        os._exit(1)


# While threads still can be started: the public `atexit` comes too late for what reading back a copy and fsspec need.
threading._register_atexit(_finish)  # type: ignore[attr-defined]
atexit.register(_report)  # as early as this module: what was registered later runs before it


def reserve(locals_: Sequence[Local]) -> None:
    """Have memory for their values, in a buffer that is used again by the next save. MemoryError."""
    global _buffer
    nbytes = sum(map(_room, locals_))
    if _buffer.size < nbytes:
        _buffer = np.empty(0, np.uint8)  # give the old one back first
        _buffer = np.empty(nbytes, np.uint8)


def copied(locals_: Sequence[Local]) -> list[Local]:
    """The same with their values of now, in the memory that `reserve` has made."""
    copies, start = [], 0
    for local in locals_:
        array = _buffer[start : start + local.array.nbytes].view(local.array.dtype).reshape(local.array.shape)
        np.copyto(array, local.array)
        copies.append(local._replace(array=array))
        start += _room(local)
    return copies


def _room(local: Local) -> int:
    return -(-local.array.nbytes // _ALIGNMENT) * _ALIGNMENT
