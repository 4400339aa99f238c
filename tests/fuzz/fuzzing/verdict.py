"""Whether an error refuses an input as the project does: on purpose, and in one line."""

import dis
import traceback
from pathlib import Path
from types import TracebackType

import collectives
from collectives.texts import shown
from fuzzing.target import RefusedError

MAX_MESSAGE = 2000
_PROJECT = tuple(
    str(Path(collectives.__file__).parents[1] / package) + "/" for package in ("ckpt", "collectives", "mpitrain")
)
_RAISE = dis.opmap["RAISE_VARARGS"]


def fault(error: BaseException, expected: tuple[type[Exception], ...]) -> str | None:
    """What is wrong with the error as the answer to an input, or None: it is one of `expected`, or `RefusedError`."""
    if not isinstance(error, RefusedError):
        if not isinstance(error, expected):
            return f"{type(error).__name__}, which is none of its errors"
        if not _is_raised_by_project(error.__traceback__) and not _names_a_file(error):
            return f"{type(error).__name__}, which something else than the project has raised"
    message = str(error)
    if not message or shown(message) != message:
        return f"a message that is not one line: {message!r:.300}"
    return None if len(message) <= MAX_MESSAGE else f"a message of {len(message)} characters"


def described(error: BaseException) -> str:
    """The end of the error's traceback."""
    return "".join(traceback.format_exception(error, limit=-12))[-6000:]


def _names_a_file(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.filename is not None


def _is_raised_by_project(place: TracebackType | None) -> bool:
    """Whether the innermost frame is one of the project's, and stands at a `raise`, not at a call of something else that failed."""
    if place is None:
        return False
    while place.tb_next is not None:
        place = place.tb_next
    code = place.tb_frame.f_code
    return code.co_filename.startswith(_PROJECT) and code.co_code[place.tb_lasti] == _RAISE
