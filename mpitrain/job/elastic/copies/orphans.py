"""Finds the copies in node memory whose run is dead, and removes them.

The processes of a run hold its copies while they live (holding.py), and a rank locks the copies that it has mapped. The kernel drops
both locks with the process. A relaunch may still want the copies of a run that died a short time ago.
"""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from collectives.environment import memory_folder
from mpitrain.job.elastic.copies.folders import files_in_own_folders, tidy
from mpitrain.job.elastic.copies.holding import HELD, alone, files_of_holders, unheld

KEPT_S = 3600.0
"""The time for which the copies of a dead run are kept for its next launch."""


def orphans(older_than_s: float = KEPT_S) -> list[Path]:
    """The copies of this user on this node that no living process locks, and that were last written `older_than_s` ago or more."""
    found = []
    for files, paths in _old_copies(older_than_s).items():
        with unheld(*files, make=False) as free:
            found += [path for path in paths if free and _is_free(path)]
    return found


def remove_orphans(older_than_s: float = KEPT_S) -> list[Path]:
    """Remove the files that `orphans` lists, and return their paths. A file that another process removes first is left out."""
    removed = []
    for files, paths in _old_copies(older_than_s).items():
        with unheld(*files, make=True) as free:
            if not free:
                continue
            for path in paths:
                with alone(path) as is_free, suppress(OSError):
                    if is_free:
                        path.unlink()
                        removed.append(path)
            for file in files:
                if not [path for path in file.parent.glob(f"{file.name.removesuffix(HELD)}*") if path != file]:
                    with suppress(OSError):
                        file.unlink()
    tidy()
    return removed


def _old_copies(older_than_s: float) -> dict[tuple[Path, ...], list[Path]]:
    """The old copies of each run, by the files that its processes lock. A run of which those alone are left has none."""
    now, user = time.time(), os.getuid()
    old: dict[tuple[Path, ...], list[Path]] = {}
    for path, held in _files(user):
        with suppress(OSError):  # removed in the meantime
            its = path.lstat()
            if its.st_uid == user and path.is_file() and not path.is_symlink() and now - its.st_mtime >= older_than_s:
                old.setdefault(held, []).extend([path] * (path not in held))
    return old


def _files(user: int) -> Iterator[tuple[Path, tuple[Path, ...]]]:
    """The files of this user's runs on this node, each with those that the processes of its run lock."""
    for path in files_in_own_folders("copy-*-*"):
        yield path, files_of_holders(path.name.split("-")[1])
    # Of an earlier version, which had them all in the folder for all users.
    for path in sorted(memory_folder().glob(f"mpitrain-copy-{user}-*")):
        run = path.name.split("-")[3]
        yield path, (path.with_name(f"mpitrain-copy-{user}-{run}-{HELD}"),)


def _is_free(path: Path) -> bool:
    with alone(path) as free:
        return free
