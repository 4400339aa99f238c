"""The commands by which the supervisor removes the copies of a run in node memory from all hosts, when a checkpoint has its state.

The ranks that end a run remove those of their own hosts. A host that was lost and came back, or all of whose ranks were lost, has
others. The names of the files are those of files.py, and the folders those of folders.py.
"""

import os
import shlex

_REMOVE = r"""
[ -n "$folder" ] || { folder=/dev/shm && [ -d "$folder" ]; } || folder=${TMPDIR:-/tmp}
num=0
for own in "$folder/mpitrain-$(id -u)" "$folder/mpitrain-$(id -u)".[0-9]; do
    [ -d "$own" ] && [ ! -L "$own" ] && [ -O "$own" ] || continue
    for file in "$own/copy-$run"-*; do
        [ -f "$file" ] && [ ! -L "$file" ] && rm -f -- "$file" && num=$((num + 1))
    done
    rmdir -- "$own" 2>/dev/null || true
done
"""
"""Counts the files in num."""


def script(run: str) -> str:
    """The commands for a shell on one host. MPITRAIN_SHM_DIR is that of this process. `run`: its id, as in names of files."""
    folder = os.environ.get("MPITRAIN_SHM_DIR", "")
    return f"run={shlex.quote(run)}\nfolder={shlex.quote(folder)}\n{_REMOVE}"
