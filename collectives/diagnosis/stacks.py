"""Where a thread of this process stands, in words. Looked up when somebody asks, so that no call pays for it."""

import sys
import traceback
from types import FrameType

_PACKAGE = __name__.partition(".")[0]


def caller(frame: FrameType | None) -> str:
    """file:line in function of the nearest frame outside this package, from `frame` outwards; "" where there is none."""
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def call_site(thread: int) -> str:
    """`caller` for the thread of that ident, "" if it has ended or runs nothing but this package's work."""
    site = caller(sys._current_frames().get(thread))
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
