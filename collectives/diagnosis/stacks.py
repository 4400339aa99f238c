"""Where a thread of this process stands, in words. Looked up when somebody asks, so that no call pays for it.

Only an operation that is carried out later than it was called, or by another thread, notes its place at once: `issued_here`.
"""

import sys
import threading
import traceback
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

_PACKAGE = __name__.partition(".")[0]


class Site:
    """The place of a call."""

    __slots__ = ("_code", "_line")

    def __init__(self, code: CodeType | None, line: int) -> None:
        self._code, self._line = code, line

    def __str__(self) -> str:
        return "" if self._code is None else f"{self._code.co_filename}:{self._line} in {self._code.co_name}"

    def carry_out(self, operation: Callable[[], Any]) -> Any:
        """What the call asked for: while it goes on, this is where its thread is said to be."""
        thread = threading.get_ident()
        outer = _working_for.get(thread)
        _working_for[thread] = self
        try:
            return operation()
        finally:
            if outer is None:
                del _working_for[thread]
            else:
                _working_for[thread] = outer


_working_for: dict[int, Site] = {}  # by thread


def issued_here() -> Site:
    """The place where this package was called, or the call that this thread works for."""
    return _working_for.get(threading.get_ident()) or _caller(sys._getframe(1))


def _caller(frame: FrameType | None) -> Site:
    """The nearest frame outside this package, from `frame` outwards."""
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
    return Site(None, 0) if frame is None else Site(frame.f_code, frame.f_lineno)


def call_site(thread: int) -> str:
    """file:line in function of the call that the thread of that ident is in; "" if it is in none."""
    site = str(_working_for.get(thread) or _caller(sys._current_frames().get(thread)))
    return "" if "/threading.py:" in site else site


def inside_package(thread: int) -> bool:
    """Whether the thread of that ident is in a call of this package, however deep."""
    frame = sys._current_frames().get(thread)
    while frame is not None and not _is_ours(frame):
        frame = frame.f_back
    return frame is not None


def standing(thread: int, depth: int = 3) -> str:
    """The innermost `depth` frames of a thread, innermost first: "a.py:3 in f, from b.py:10 in g"."""
    frame = sys._current_frames().get(thread)
    places: list[str] = []
    while frame is not None and len(places) < depth:
        places.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return ", from ".join(places) or "no Python code"


def stack(thread: int) -> str:
    """The whole stack of a thread, as a traceback shows it."""
    frame = sys._current_frames().get(thread)
    return "" if frame is None else "".join(traceback.format_stack(frame))


def _is_ours(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE
