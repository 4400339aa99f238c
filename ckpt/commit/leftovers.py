"""The hidden folders, beside checkpoints, of running or interrupted saves, and the action for each."""

import contextlib
import os
import socket
import time
from typing import NamedTuple

from ckpt.commit.owner import FolderOwner, is_alive, owner_in
from ckpt.commit.removal import delete, strangers_in
from ckpt.storage.local_path import LocalPath

QUIET_S = 60.0  # an unsigned folder with a change in this time may belong to a live job between two steps
_ABANDONED_S = 3600.0
"""A stage of another host, whose process cannot be checked, counts as a dead job's after this time without a change."""


class Leftover(NamedTuple):
    """A hidden folder of a save. `action`: "remove" or "restore" (to `original`) the folder of a dead job, "keep" that of a live job.

    "keep" is also the action for a folder with a foreign file.
    """

    path: LocalPath
    action: str
    why: str

    @property
    def original(self) -> LocalPath:
        """The checkpoint to which the folder belongs."""
        return self.path.with_name(self.path.name[1:].rpartition(".")[0])


def leftovers(folder: LocalPath, *, own: LocalPath | None = None) -> list[Leftover]:
    """The hidden folders in `folder` of running or interrupted saves, sorted by name. `own`: the checkpoint that this job writes.

    An unsigned folder counts as a dead job's, unless it holds foreign files, or changed in the last minute and is not of `own`.
    """
    kinds = (".staging", ".replaced", ".removed", ".board")
    # A checkpoint may have been a link to a folder.
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir() or entry.is_symlink())
    ours = (name for name in names if name.startswith(".") and os.path.splitext(name)[1] in kinds)
    return [_judged(folder / name, own) for name in ours]


def settle(leftover: Leftover) -> None:
    """Carry out the action. A folder that cannot be removed stays; OSError if it cannot be restored."""
    if leftover.action == "restore":
        with contextlib.suppress(FileNotFoundError):  # another process has restored it
            os.rename(leftover.path, leftover.original)
    elif leftover.action == "remove":
        with contextlib.suppress(OSError):
            delete(leftover.path)


def _judged(path: LocalPath, own: LocalPath | None) -> Leftover:
    if strange := strangers_in(path):
        return Leftover(path, "keep", f"holds {strange[0]!r:.80}, which no save made")
    kind = path.suffix
    stage = path.with_suffix(".staging")
    if kind == ".removed":
        return Leftover(path, "remove", "half removed")
    if kind in (".staging", ".board") and (owner := owner_in(path)) is not None:
        whose = f"of process {owner.pid!r:.20} on {owner.host!r:.80}"
        if _is_abandoned(path, owner):
            return Leftover(path, "remove", f"a save {whose}, which is gone")
        return Leftover(path, "keep", f"a save {whose}, which may go on")
    if kind == ".board" and stage.exists():
        return _judged(stage, own)._replace(path=path)
    # Not only the time of writing, because the last change may be a rename.
    with contextlib.suppress(FileNotFoundError):
        changed = max(path.lstat().st_mtime, path.lstat().st_ctime)
        recent = Leftover(path, "keep", f"changed in the last {QUIET_S:.0f} s: a save may go on")
        if time.time() - changed < QUIET_S and recent.original != own:
            return recent
    if kind == ".board":  # the board of a dead job, or one that all ranks have read
        return Leftover(path, "remove", "its save ended")
    if kind == ".replaced":
        restore = Leftover(path, "restore", "its replacement never came")
        return restore._replace(action="remove", why="it was replaced") if restore.original.exists() else restore
    return Leftover(path, "remove", "a save that died before it could sign")


def _is_abandoned(stage: LocalPath, owner: FolderOwner) -> bool:
    if owner.host == socket.gethostname():
        return not is_alive(owner) and owner_in(stage) == owner  # and not one that was just renamed to this path
    try:
        with os.scandir(stage) as entries:
            changed = max(entry.stat().st_mtime for entry in [*entries, stage])
    except OSError:
        return False
    return time.time() - changed > _ABANDONED_S
