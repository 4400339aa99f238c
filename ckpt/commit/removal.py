"""How checkpoints, and the hidden folders of saves, go: hidden first, so that nobody finds half of one."""

import contextlib
import errno
import os
import re
import shutil
import warnings
from pathlib import Path

from ckpt.commit.owner import signature
from ckpt.format.manifest import FILE_NAME
from ckpt.storage.catalog import OWNER_NAME, info, newest_first, reason_to_keep, step_of, strangers
from ckpt.storage.places import Place, is_there
from ckpt.storage.remote import Url

_MESSAGES = r"\.board|[0-9]+(\.[0-9]+)?(\.part)?|(left|reserve)\.[0-9]+"
"""What lies on a board (board.py), and the name of one in the making."""


def retain(final: Place, keep: int | None, keep_every: int | None = None) -> None:
    """Remove what is older than the newest `keep` complete checkpoints beside `final`, but not `final` itself.

    Only those count, and go, whose name ends with a step: what has a name of its own, as "best", somebody wants to keep. Nor does one
    go whose step is a multiple of `keep_every`. The newest one was saved last, whatever its step.
    """
    for path in [] if keep is None else outdated(final, keep, keep_every):
        try:
            remove(path)
        except OSError as error:
            if not is_there(path):  # another save that clears up as well was faster
                continue
            # The new checkpoint stands: no reason to end a run.
            warnings.warn(f"the old checkpoint {path} could not be removed: {error}", RuntimeWarning, stacklevel=2)


def outdated(final: Place, keep: int, keep_every: int | None = None) -> list[Place]:
    """What `retain` removes, newest first."""
    complete = 0
    found = []
    for path, _ in newest_first(final.parent):
        step = step_of(path.name)
        if step is None or (keep_every is not None and step % keep_every == 0 and path != final):
            continue
        if complete >= keep and path != final:
            found.append(path)
        elif info(path, path.name).complete:
            complete += 1
    return found


def remove(path: Place) -> None:
    """Remove a checkpoint: under its name it is gone at once. OSError if not even that can be done, or may not be."""
    if reason := reason_to_keep(path):
        raise PermissionError(errno.EPERM, f"it {reason}", str(path))
    if isinstance(path, Url):
        (path / OWNER_NAME).write(signature(""))  # should this job die on the way, the next one goes on
        path.remove_folder(FILE_NAME, OWNER_NAME)
        return
    _take_away(path)


def take_away(path: Path) -> None:
    """Remove a folder of a save, which nobody finds half of. Never raises: what stays is for a later save to clear."""
    with contextlib.suppress(OSError):
        refuse_strangers(path)
        _take_away(path)


def _take_away(path: Path) -> None:
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
        if os.path.lexists(path):  # unless somebody else cleared up as well
            problem = f"it cannot be removed: {error.strerror}, {os.path.basename(str(error.filename))}"
            raise OSError(error.errno, problem, str(path)) from error


def _remove_tree(path: Path) -> None:
    while True:
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            if os.path.lexists(path):  # somebody else clears up as well, and was faster with a file: the rest is left
                continue
        return


def strangers_in(path: Path) -> list[str]:
    """What is in a hidden folder and was not put there by a save. Nothing is in a link."""
    try:
        names = [] if path.is_symlink() else sorted(os.listdir(path))
    except OSError:  # a job that clears up as well
        return []
    return [name for name in strangers(names) if not re.fullmatch(_MESSAGES, name)]
