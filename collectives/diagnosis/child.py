"""The end of a child process that a rank has forked.

It is no rank: the hooks and the monitor leave it alone (uncaught.py, hangs/monitor.py), and its communicators refuse to work
(progress/unusable.py). MPI itself is left, which mpi4py finalizes when Python is gone, in a child too: MPI_Finalize waits there for
ever for what it has not got.
"""

import atexit
import dis
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any


def leave_before_finalize(last_exit: Callable[[], tuple[Any] | None]) -> None:
    """From now on a child that is forked here leaves at the end of its exit hooks, without MPI_Finalize, as multiprocessing's do.

    `last_exit`: tells the code of the `sys.exit` that has ended the program. Nobody learns that of a SystemExit which was raised
    otherwise: a child then ends with 1, and says so.
    """
    from mpi4py import MPI

    process, script, leave_at_once = os.getpid(), _outermost_frame(), os._exit

    def leave() -> None:
        if os.getpid() == process or MPI.Is_finalized():
            return
        if (ended := last_exit()) is not None:
            status = _status(ended[0])
        elif script is not None and _has_returned(script):
            status = 0
        else:
            status = 1
            if not hasattr(sys, "last_value"):
                print(
                    "a forked child raised SystemExit, whose code is not known: it ends with 1; end it by sys.exit or os._exit",
                    file=sys.stderr,
                )
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        leave_at_once(status)

    atexit.register(leave)


def _status(code: Any) -> int:
    """The exit status that `sys.exit(code)` leads to."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def _outermost_frame() -> FrameType | None:
    """Of the main thread: the script's, or of what runs it."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _has_returned(frame: FrameType) -> bool:
    """Whether a frame that has ended did so by itself. An exception leaves it at another instruction."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")
