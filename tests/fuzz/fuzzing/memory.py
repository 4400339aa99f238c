"""The memory of a process and its child processes together: a reader may let a child read what could end its own process."""

import contextlib
import os
import re
from pathlib import Path
from typing import NamedTuple


class Memory(NamedTuple):
    """Bytes of a process, and of its children together."""

    own: int
    children: int


def now(pid: int) -> Memory:
    """What the processes need now."""
    return _summed(pid, "VmRSS")


def peak(pid: int) -> Memory:
    """What each process needed at most since `forget_peaks`, added up: at least what all needed at one time."""
    return _summed(pid, "VmHWM")


def forget_peaks(pid: int) -> None:
    """Let the peaks begin anew, where the system allows it."""
    for its in _with_children(pid):
        with contextlib.suppress(OSError):
            Path(f"/proc/{its}/clear_refs").write_text("5")


def _summed(pid: int, key: str) -> Memory:
    own, *children = (_number(its, key) << 10 for its in _with_children(pid))
    return Memory(own, sum(children))


_parents: dict[int, int] = {}


def _with_children(pid: int) -> list[int]:
    """The process and what it has started. A child that is not yet another program shares the memory of its parent."""
    there = {int(name) for name in os.listdir("/proc") if name.isdecimal()}
    for gone in _parents.keys() - there:
        del _parents[gone]
    for new in there - _parents.keys():
        _parents[new] = _number(new, "PPid")
    found, program = [pid], _read(pid, "cmdline")
    for its in found:
        found += [child for child, parent in _parents.items() if parent == its and _read(child, "cmdline") != program]
    return found


def _number(pid: int, key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+)", _read(pid, "status"), re.MULTILINE)
    return int(found[1]) if found else 0  # it ends


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError:
        return ""
