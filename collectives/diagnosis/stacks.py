"""The place of a thread of this process in its program, as text. It is looked up only for a report, so that calls take no time for it.

Only an operation that is carried out later, or by another thread, notes its place when it is called: `issued_here`. A place is in the
user's program: frames of libraries in between are left out (`pass_over`), but calls in them can have a name for reports (`name`).
A place in another library, such as a trainer, has the innermost frame of the user's own files beside it.
"""

import functools
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_PACKAGE = __name__.partition(".")[0]

_passed_over = [_PACKAGE, "contextlib"]
_is_passed_over: dict[str, bool] = {}  # by the name of a module
_names: dict[CodeType, Callable[[Mapping[str, Any]], str]] = {}

_ROOT = Path(__file__).parents[2]
# The folders of libraries: Python's own, those of pip, and the packages of this project, which may run from a checkout.
_LIBRARIES = tuple(
    {f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {f"{_ROOT / name}/" for name in (_PACKAGE, "ckpt", "mpitrain")}
)


def pass_over(*packages: str) -> None:
    """Leave out the frames of these packages and modules, if the program that calls them has a frame."""
    _passed_over.extend(packages)
    _is_passed_over.clear()


def name(function: Callable[..., Any], words: Callable[[Mapping[str, Any]], str]) -> None:
    """Let reports describe a thread in a call of `function` by `words(local variables)`. The innermost named call counts."""
    _names[function.__code__] = words


class Site:
    """The place of a call. `user`: the place in the user's own files from which it was reached, if this one is in a library."""

    __slots__ = ("_code", "_line", "_user")

    def __init__(self, code: CodeType | None, line: int, user: "Site | None" = None) -> None:
        self._code, self._line, self._user = code, line, user

    def __str__(self) -> str:
        if self._code is None:
            return ""
        place = f"{self._code.co_filename}:{self._line} in {self._code.co_name}"
        return place if self._user is None else f"{place}, from {self._user}"

    def carry_out(self, operation: Callable[[], Any]) -> Any:
        """Carry out the operation of the call; until its end reports show this place for the thread."""
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
    """The place where the program has called this package, or the place of the call that this thread carries out."""
    return _working_for.get(threading.get_ident()) or _caller(sys._getframe(1))


def _caller(frame: FrameType | None) -> Site:
    """The innermost frame of the program, from `frame` outwards; if there is none, the innermost one outside this package."""
    outside: FrameType | None = None
    while frame is not None:
        if _package_of(frame.f_globals.get("__name__", "")) != _PACKAGE:
            if not _is_between(frame):
                return _site(frame)
            outside = outside or frame
        frame = frame.f_back
    return Site(None, 0) if outside is None else _site(outside)


def _site(frame: FrameType) -> Site:
    code = frame.f_code
    return Site(code, frame.f_lineno, _user_outside(frame) if _is_library(code.co_filename) else None)


def _user_outside(frame: FrameType) -> Site | None:
    """The innermost frame of the user's own files outside of a library's frame, if there is one."""
    user = frame.f_back
    while user is not None and _is_library(user.f_code.co_filename):
        user = user.f_back
    return None if user is None else Site(user.f_code, user.f_lineno)


@functools.cache
def _is_library(file: str) -> bool:
    """Whether a file of code belongs to Python, to an installed package or to this project, or is code that a library has made."""
    if file.startswith("<"):
        return not file.startswith(("<string>", "<stdin>", "<console>", "<ipython"))  # what a user types
    return file.startswith(_LIBRARIES) or "/site-packages/" in file or "/dist-packages/" in file  # of any environment


def call_site(thread: int) -> str:
    """The place of the call in which the thread of that ident is, as "file:line in function"; "" if it is in no call."""
    site = str(_working_for.get(thread) or _caller(sys._current_frames().get(thread)))
    return "" if "/threading.py:" in site else site


def inside_package(thread: int) -> bool:
    """Whether the thread of that ident is in a call of this package, at any depth."""
    return _is_inside(sys._current_frames().get(thread), _PACKAGE)


def any_inside(package: str) -> bool:
    """Whether a thread of this process is in a call of `package`, at any depth."""
    return any(_is_inside(frame, package) for frame in sys._current_frames().values())


def _is_inside(frame: FrameType | None, package: str) -> bool:
    while frame is not None and _package_of(frame.f_globals.get("__name__", "")) != package:
        frame = frame.f_back
    return frame is not None


def is_of_package(frame: FrameType) -> bool:
    """Whether a frame belongs to this package."""
    return _package_of(frame.f_globals.get("__name__", "")) == _PACKAGE


def standing(thread: int, depth: int = 3) -> str:
    """The innermost frame of a thread and the next frames of the program, `depth` in all: "a.py:3 in f, from b.py:10 in g".

    If all of these are of libraries, the innermost frame of the user's own files is added.
    """
    frame = sys._current_frames().get(thread)
    shown: list[FrameType] = []
    while frame is not None and len(shown) < depth:
        if not shown or not _is_between(frame):
            shown.append(frame)
        frame = frame.f_back
    places = [str(Site(each.f_code, each.f_lineno)) for each in shown]
    if all(_is_library(each.f_code.co_filename) for each in shown) and shown and (user := _user_outside(shown[-1])):
        places.append(str(user))
    return ", from ".join(places) or "no Python code"


_SHOWN_OF_ERROR = 200  # characters


def handling(thread: int) -> str:
    """The exception that the thread of that ident handles, as in a `finally` that waits, as ", while it handles ..."; "" if none.

    Nothing else would show it if the job ends in this wait.
    """
    error: Any = sys._current_exceptions().get(thread)
    error = error[1] if isinstance(error, tuple) else error  # of Python 3.11
    if error is None:
        return ""
    text = " ".join("".join(traceback.format_exception_only(error)).split())
    return f", while it handles {text if len(text) <= _SHOWN_OF_ERROR else f'{text[:_SHOWN_OF_ERROR]} ...'}"


def main_thread() -> int:
    """The ident of this process's main thread."""
    return threading.main_thread().ident or 0


def doing(thread: int) -> str:
    """The words of the innermost named call (see `name`) of the thread of that ident; "" if there is no named call.

    For a thread that carries out operations of the main thread these are the words of the main thread's call.
    """
    main, words = main_thread(), _named(thread)
    return words or (_named(main) if thread in _working_for and thread != main and inside_package(main) else "")


def _named(thread: int) -> str:
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if (words := _names.get(frame.f_code)) is not None:
            with suppress(Exception):  # a local variable may have no value yet
                return words(frame.f_locals)
        frame = frame.f_back
    return ""


def stack(thread: int) -> str:
    """The whole stack of a thread, formatted like a traceback."""
    frame = sys._current_frames().get(thread)
    return "" if frame is None else "".join(traceback.format_stack(frame))


@functools.cache
def _package_of(module: str) -> str:
    return module.partition(".")[0]


def _is_between(frame: FrameType) -> bool:
    """Whether a frame belongs to a package of `pass_over`."""
    module: str = frame.f_globals.get("__name__", "")
    known = _is_passed_over.get(module)
    if known is None:
        known = _is_passed_over[module] = any(f"{module}.".startswith(f"{each}.") for each in _passed_over)
    return known
