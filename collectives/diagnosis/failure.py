"""The failure file: the whole report of a failure, for readers who find the job ended.

Many ranks may fail at once, and the launcher may end each of them at any time. The first report is written under another name and then
linked, so that the file never has a part of it. Later reports are appended.

A second file is named by MPITRAIN_FAILURE_FILE: mpirun/train prints it last, after the lines of mpirun. It is a link to the first one
as soon as that is known, because a rank on another host does not see the script's own folder.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from collectives.diagnosis import dump, oom
from collectives.files import open_regular, partial_of, write_new
from collectives.texts import without_secrets

_VARIABLE = "MPITRAIN_FAILURE_FILE"


class _Output:
    file: Path | None = None
    tell: Callable[[str], object] | None = None
    may_write: Callable[[], bool] = staticmethod(lambda: True)


def set_failure_file(
    file: str | Path | None,
    tell: Callable[[str], object] | None = None,
    may_write: Callable[[], bool] = lambda: True,
) -> None:
    """Write the report of a failure also to this file. None: only to stderr. No rank may write to it before its folder is the job's.

    `tell`: gets the first report, on the rank that writes it. `may_write`: whether the folder still belongs to this job; if not, no
    report is written there. Any thread may call both.
    """
    _Output.file = None if file is None else Path(file).absolute()
    _Output.tell, _Output.may_write = tell, may_write
    if (also := _also()) is not None:
        with suppress(OSError):  # another rank has done it, or the script is on another host
            if _Output.file is not None:
                also.symlink_to(_Output.file)
            elif also.is_symlink():
                also.unlink()


def write_failure(report: str, *, make_folder: bool = True) -> None:
    """Write a report of a failure to the files, if there are any. Does not raise OSError. Kills of the OOM killer that it does not name
    are added, and printed.

    `make_folder`: make the folder of the file, if there is none. A run that was refused makes no folder.
    """
    file, also = _Output.file, _also()
    if file is not None and not _Output.may_write():
        if also is not None and also.parent == file.parent:
            return  # the supervisor's, and so of a later launch by now
        file = None
    if more := oom.note(report):
        dump.say(more)
        report = f"{report.rstrip()}\n{more}"
    report = without_secrets(report)
    text = f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{report.rstrip()}\n"
    if file is not None:
        with suppress(OSError):
            if make_folder:
                file.parent.mkdir(parents=True, exist_ok=True)
            if _write(file, text) and _Output.tell is not None:
                _Output.tell(report)
    if also is not None:
        with suppress(OSError):
            if file is None and also.is_symlink():
                also.unlink()
            if not also.is_symlink():
                _write(also, text)


def is_in_report(words: str) -> bool:
    """Whether the report of a failure that is there already has these words. Of an earlier job none is there."""
    for file in (_Output.file, _also()):
        with suppress(OSError):
            if file is not None and words in file.read_text(errors="replace"):
                return True
    return False


def _also() -> Path | None:
    return Path(os.environ[_VARIABLE]) if os.environ.get(_VARIABLE) else None


def _write(file: Path, text: str) -> bool:
    """Append a report; whether it is the first one in the file."""
    partial = partial_of(file, sweeps=False)
    data = text.encode(errors="backslashreplace")  # names of files may be no text
    try:
        write_new(partial, data)
        os.link(partial, file)
        return True
    except OSError:  # there is a report already, or a file system has no links
        is_first = not file.exists()
        with open(open_regular(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as stream:
            stream.write(data)
        return is_first
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
