"""The commands by which the supervisor removes the copies of a run in node memory from all hosts, when a checkpoint has its state.

The ranks that end a run remove those of their own hosts. A host that was lost and came back, or all of whose ranks were lost, has
others. The names of the files are those of files.py, and the folders those of folders.py.
"""

import os
import shlex

_REMOVE = r"""
[ -n "$folder" ] || { folder=/dev/shm && [ -d "$folder" ]; } || folder=${TMPDIR:-/tmp}
num=0 live=
for own in "$folder/mpitrain-$(id -u)" "$folder/mpitrain-$(id -u)".[0-9]; do
    [ ! -L "$own" ] && [ -O "$own" ] && [ -f "$own/copy-$run-held" ] && [ ! -L "$own/copy-$run-held" ] || continue
    flock -n "$own/copy-$run-held" true || live=1
done
for own in "$folder/mpitrain-$(id -u)" "$folder/mpitrain-$(id -u)".[0-9]; do
    [ -z "$live" ] && [ -d "$own" ] && [ ! -L "$own" ] && [ -O "$own" ] || continue
    for file in "$own/copy-$run"-*; do
        [ -f "$file" ] && [ ! -L "$file" ] && rm -f -- "$file" && num=$((num + 1))
    done
    rmdir -- "$own" 2>/dev/null || true
done
"""
"""Counts the files in num. If a process holds the lock of a file "held" (holding.py), the copies are those of another job: its run's
folder was copied, with the id in it. Then none is removed."""


def script(run: str) -> str:
    """The commands for a shell on one host. MPITRAIN_SHM_DIR is that of this process. `run`: its id, as in names of files."""
    folder = os.environ.get("MPITRAIN_SHM_DIR", "")
    return f"run={shlex.quote(run)}\nfolder={shlex.quote(folder)}\n{_REMOVE}"
