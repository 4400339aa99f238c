"""Finds the copies in node memory whose run is dead, and removes them.

The processes of a run hold its copies while they live (holding.py), and a rank locks the copies that it has mapped. The kernel drops
both locks with the process. A relaunch may still want the copies of a run that died a short time ago.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

from collectives.transports.node.memory import folder
from mpitrain.elastic.copies.holding import alone, file_of, unheld

KEPT_S = 3600.0
"""The time for which the copies of a dead run are kept for its next launch."""


def orphans(older_than_s: float = KEPT_S) -> list[Path]:
    """The copies of this user on this node that no living process locks, and that were last written `older_than_s` ago or more."""
    found = []
    for run, paths in _old_copies(older_than_s).items():
        with unheld(run, make=False) as free:
            found += [path for path in paths if free and _is_free(path)]
    return found


def remove_orphans(older_than_s: float = KEPT_S) -> list[Path]:
    """Remove the files that `orphans` lists, and return their paths. A file that another process removes first is left out."""
    removed = []
    for run, paths in _old_copies(older_than_s).items():
        with unheld(run, make=True) as free:
            if not free:
                continue
            for path in paths:
                with alone(path) as is_free, suppress(OSError):
                    if is_free:
                        path.unlink()
                        removed.append(path)
            if not _copies_of(run):
                with suppress(OSError):
                    file_of(run).unlink()
    return removed


def _old_copies(older_than_s: float) -> dict[str, list[Path]]:
    """The old copies of each run. A run of which only the file for its processes is left has none."""
    now, user = time.time(), os.getuid()
    old: dict[str, list[Path]] = {}
    for path in sorted(folder().glob(f"mpitrain-copy-{user}-*")):
        with suppress(OSError):  # removed in the meantime
            its = path.lstat()
            if its.st_uid == user and path.is_file() and not path.is_symlink() and now - its.st_mtime >= older_than_s:
                run = path.name.split("-")[3]
                old.setdefault(run, []).extend([path] * (path != file_of(run)))
    return old


def _copies_of(run: str) -> list[Path]:
    own = file_of(run)
    return [path for path in own.parent.glob(f"{own.name.removesuffix('held')}*") if path != own]


def _is_free(path: Path) -> bool:
    with alone(path) as free:
        return free
