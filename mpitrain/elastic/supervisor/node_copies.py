"""Removes the copies of a run in node memory from all hosts, when a checkpoint has its state.

The ranks that end a run remove those of their own hosts. A host that was lost and came back, or all of whose ranks were lost, has
others. The names of the files are those of mpitrain/elastic/copies/files.py, and the folders those of folders.py beside it.
"""

import os
import shlex
from collections.abc import Mapping, Sequence

from mpitrain.elastic.supervisor.agents import Agent, count

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


def remove_copies(agent: Agent, hosts: Sequence[str], run: str, timeout_s: float, indices: Mapping[str, int]) -> int:
    """Remove a run's copies from the hosts that answer in time, and from this one; returns the number of files.

    `run`: its id, as in the names of the files. `indices`: of the hosts in the batch system's list.
    """
    return sum(count(agent, hosts, script(run), timeout_s, indices).values())


def script(run: str) -> str:
    """The commands for one host. MPITRAIN_SHM_DIR is the one of this process."""
    folder = os.environ.get("MPITRAIN_SHM_DIR", "")
    return f"run={shlex.quote(run)}\nfolder={shlex.quote(folder)}\n{_REMOVE}"
