"""Removal of local checkpoints and of the hidden folders of saves. A checkpoint is hidden first, so that no reader finds half of it."""

import contextlib
import errno
import os
import re
import shutil
from pathlib import Path

from ckpt.storage.catalog import strangers

_MESSAGES = r"\.board|[0-9]+(\.[0-9]+)?(\.part)?|(left|reserve)\.[0-9]+"
"""The names of the files on a board (board.py), including unfinished files."""


def take_away(path: Path) -> None:
    """Hide and remove a folder of a save. Never raises: a later save removes the files that stay."""
    with contextlib.suppress(OSError):
        refuse_strangers(path)
        hide_and_delete(path)


def hide_and_delete(path: Path) -> None:
    """Remove a folder. Its name disappears at once. OSError if this is not possible."""
    hidden = path.parent / f".{path.name.strip('.')}.removed"
    clear(hidden)
    os.rename(path, hidden)
    with contextlib.suppress(OSError):
        delete(hidden)


def clear(path: Path) -> None:
    """Remove a hidden folder of a save, if it exists. FileExistsError if it holds foreign files."""
    refuse_strangers(path)
    delete(path)


def refuse_strangers(path: Path) -> None:
    """FileExistsError if a hidden folder holds foreign files."""
    if os.path.lexists(path) and (strange := strangers_in(path)):
        raise FileExistsError(errno.EEXIST, f"it holds {strange[0]!r:.80}, which no save made; move it away", str(path))


def delete(path: Path) -> None:
    """Remove a folder, if it exists, or a link to one (not its target). OSError that names it, if a part of it stays."""
    try:
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
        else:
            _remove_tree(path)
    except OSError as error:
        if os.path.lexists(path):  # unless another process has removed it
            problem = f"it cannot be removed: {error.strerror}, {os.path.basename(str(error.filename))}"
            raise OSError(error.errno, problem, str(path)) from error


def _remove_tree(path: Path) -> None:
    while True:
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            if os.path.lexists(path):  # another process has removed a file meanwhile: go on with the rest
                continue
        return


def strangers_in(path: Path) -> list[str]:
    """The foreign names in a hidden folder: no save makes files of these names. A link has no names."""
    try:
        names = [] if path.is_symlink() else sorted(os.listdir(path))
    except OSError:  # another job has removed it
        return []
    return [name for name in strangers(names) if not re.fullmatch(_MESSAGES, name)]
