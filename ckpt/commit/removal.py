"""Removal of local checkpoints and of the hidden folders of saves: hidden first, so that no reader finds half of one."""

import contextlib
import errno
import os
import re
import shutil
from pathlib import Path

from ckpt.storage.catalog import strangers

_MESSAGES = r"\.board|[0-9]+(\.[0-9]+)?(\.part)?|(left|reserve)\.[0-9]+"
"""The names of the files on a board (board.py), also of one in the making."""


def take_away(path: Path) -> None:
    """Remove a folder of a save, hidden first. Never raises: a later save clears the files that stay."""
    with contextlib.suppress(OSError):
        refuse_strangers(path)
        hide_and_delete(path)


def hide_and_delete(path: Path) -> None:
    """Remove a folder: under its name it is gone at once. OSError if not even that can be done."""
    hidden = path.parent / f".{path.name.strip('.')}.removed"
    clear(hidden)
    os.rename(path, hidden)
    with contextlib.suppress(OSError):
        delete(hidden)


def clear(path: Path) -> None:
    """Remove a hidden folder of a save; nothing happens if there is none. FileExistsError if it holds what no save made."""
    refuse_strangers(path)
    delete(path)


def refuse_strangers(path: Path) -> None:
    """FileExistsError if a hidden folder holds what no save made."""
    if os.path.lexists(path) and (strange := strangers_in(path)):
        raise FileExistsError(errno.EEXIST, f"it holds {strange[0]!r:.80}, which no save made; move it away", str(path))


def delete(path: Path) -> None:
    """Remove a folder or, as such, a link to one; nothing happens if there is none. OSError that names it, if it does not all go."""
    try:
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
        else:
            _remove_tree(path)
    except OSError as error:
        if os.path.lexists(path):  # unless another process cleared up as well
            problem = f"it cannot be removed: {error.strerror}, {os.path.basename(str(error.filename))}"
            raise OSError(error.errno, problem, str(path)) from error


def _remove_tree(path: Path) -> None:
    while True:
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            if os.path.lexists(path):  # another process clears up as well, and was faster with a file: the rest is left
                continue
        return


def strangers_in(path: Path) -> list[str]:
    """The names in a hidden folder that no save put there. A link holds no names."""
    try:
        names = [] if path.is_symlink() else sorted(os.listdir(path))
    except OSError:  # a job that clears up as well
        return []
    return [name for name in strangers(names) if not re.fullmatch(_MESSAGES, name)]
