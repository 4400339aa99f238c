"""What the kernel's control groups (cgroups) say about memory: the limits of a process, and the kills of the OOM killer.

Both versions. A kill is counted in the group of the process that was killed; version 2 counts it in all groups above too. The kernel
counts first and kills then. Nothing here raises OSError: a file that cannot be read says nothing.

Standard library only, for a supervisor on hosts without packages.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from collectives.texts import show_bytes

ENDLESS = 1 << 60
"""More bytes than any memory has. Version 1 has such a number in place of no limit: the largest one, less a page."""
_BATCH = 1 << 20  # the kernel counts memory in batches of pages
_LIMITS = ("memory.max", "memory.limit_in_bytes")
_COUNTS = ("memory.events", "memory.oom_control")
_USAGES = ("memory.current", "memory.usage_in_bytes")
_GIVEN_BACK = ("inactive_file", "active_file", "slab_reclaimable")
"""Of memory.stat: what the kernel frees for processes."""
MORE_MEMORY = "ask for more memory (Slurm: --mem, docker: --memory), or start fewer ranks on a node"
_OF_HOST = "start fewer ranks on a node, or take a host with more memory"
NAMED = "the kernel's OOM killer"
"""Begins each sentence of `Kills.words`."""


def group_of(pid: int | str = "self", root: Path = Path("/")) -> Path | None:
    """The folder of the innermost group of a process that accounts for memory; None if none is seen. `root`: of all files."""
    for _, controllers, path in (
        line.split(":", 2) for line in _lines(root / f"proc/{pid}/cgroup") if line.count(":") >= 2
    ):
        is_first = "memory" in controllers.split(",")
        if not is_first and controllers:
            continue
        shown, top = _mount(root, is_first=is_first)
        # A container may see the path that the host gives to its group, or one from outside of its own: then its top is the group.
        inner = PurePosixPath(path.removesuffix(" (deleted)"))
        inner = inner.relative_to(shown) if inner.is_relative_to(shown) else PurePosixPath()
        if ".." in inner.parts:
            inner = PurePosixPath()
        for each in (inner, *inner.parents):
            if _is_group(top / each):
                return top / each
    return None


def groups_of(pid: int | str = "self", root: Path = Path("/")) -> tuple[Path, ...]:
    """The groups of a process that account for memory, from its own to the outermost one that is seen here."""
    folder = group_of(pid, root)
    return with_outer(folder) if folder is not None else ()


def with_outer(folder: Path) -> tuple[Path, ...]:
    """A group and those around it, also if it was removed."""
    outer = []
    for each in folder.parents:
        if not _is_group(each):
            break
        outer.append(each)
    return (folder, *outer)


def limit(folder: Path) -> int | None:
    """The bytes that the processes of a group may have; None: as many as the groups around it."""
    for name in _LIMITS:
        for text in _lines(folder / name)[:1]:
            if text.strip().isdecimal() and (value := int(text)) < ENDLESS:
                return value
    return None


def smallest_limit(folders: Sequence[Path]) -> int | None:
    """The bytes that a process in all of these groups may have at most; None: any number."""
    return min((value for each in folders if (value := limit(each)) is not None), default=None)


def room(folders: Sequence[Path], swap: int = 0) -> int | None:
    """The bytes that a process in all of these groups may still take; None: any number. The kernel drops copies of files for them.

    `swap`: the bytes of swap space that are free. How much of it a group may have is known in version 2 alone.
    """
    rooms = []
    for each in folders:
        if (most := limit(each)) is not None:
            its = _numbers(each / "memory.stat")
            # Version 1 has the sums over the groups below under names of their own. Shared memory is in neither.
            given_back = sum(its.get(f"total_{name}", its.get(name, 0)) for name in _GIVEN_BACK)
            used = next((usage for name in _USAGES if (usage := _number(each / name))), 0)
            rooms.append(max(most - max(used - given_back, 0), 0) + min(swap, _swap_room(each)))
    return min(rooms, default=None)


def _swap_room(folder: Path) -> int:
    """The bytes of swap space that a group may still take; 0 if it is not known."""
    for text in _lines(folder / "memory.swap.max")[:1]:
        most = ENDLESS if text.strip() == "max" else _number(folder / "memory.swap.max")
        return max(most - _number(folder / "memory.swap.current"), 0)
    return 0


class Count(NamedTuple):
    """What a group has counted since it was made: the processes that the OOM killer has ended, and, in version 2, how often it was
    called because the group's own limit was reached."""

    kills: int
    calls: int


def count(folder: Path) -> Count | None:
    """The counts of a group; None if it cannot be read, or its kernel does not count (before Linux 4.13)."""
    counts = [_numbers(folder / name) for name in _COUNTS]
    kills = next((its["oom_kill"] for its in counts if "oom_kill" in its), None)
    if kills is None:
        return None
    # "oom" of memory.events also counts what has happened in groups below.
    return Count(kills, _numbers(folder / "memory.events.local").get("oom", counts[0].get("oom", 0)))


class Kills:
    """Counts the kills of the OOM killer in `folders[0]` from now on. `folders`: a group and those around it, see `with_outer`."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = tuple(folders)
        self._before = {each: its for each in self._folders if (its := count(each)) is not None}

    def words(self) -> str:
        """A sentence with the kills, the limit and a remedy; "" without a kill. A group that was removed counts in the next one."""
        now = {each: its for each in self._folders if (its := count(each)) is not None and each in self._before}
        folder = next(iter(now), None)
        if folder is None or (num := now[folder].kills - self._before[folder].kills) <= 0:
            return ""
        whom = f"{num} process{'es' * (num > 1)} of the cgroup {folder}"
        return f"{NAMED} has ended {whom}, because {self._why(folder, now)} (docs/faults.md)"

    def _why(self, folder: Path, now: Mapping[Path, Count]) -> str:
        """Which memory was full, and what to do. `folder`: the group that lost processes."""
        limits = {each: value for each in now if (value := limit(each)) is not None}
        reached = {
            each: value
            for each, value in limits.items()
            # Version 1's memory.failcnt would count that the limit was reached, but stays 0 in Linux 6.18.
            if now[each].calls > self._before[each].calls
            or _number(each / "memory.max_usage_in_bytes") > value - _BATCH
        }
        if not reached:
            known = f"; the smallest limit of memory there is {show_bytes(min(limits.values()))}" if limits else ""
            return f"the memory of the host, or of a container around it, was full{known}: {_OF_HOST}"
        at = min(reached, key=reached.__getitem__)
        whose = "its" if at == folder else f"the outer cgroup {at} had reached its"
        return f"{whose} limit of memory, {show_bytes(reached[at])}{', was reached' * (at == folder)}: {MORE_MEMORY}"


def _mount(root: Path, *, is_first: bool) -> tuple[str, Path]:
    """The group that is shown at a mount, and the mount: of version 1's controller of memory if `is_first`, else of version 2."""
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3 or kind[0] != ("cgroup" if is_first else "cgroup2"):
            continue
        if not is_first or "memory" in kind[2].split(","):
            shown, at = (re.sub(r"\\(\d{3})", lambda its: chr(int(its[1], 8)), text) for text in fields[3:5])
            return shown, root / at.lstrip("/")
    return "/", root / ("sys/fs/cgroup/memory" if is_first else "sys/fs/cgroup")


def _is_group(folder: Path) -> bool:
    return any(_exists(folder / name) for name in (*_LIMITS, *_COUNTS))


def _exists(path: Path) -> bool:
    with suppress(OSError):
        return path.exists()
    return False


def _numbers(path: Path) -> dict[str, int]:
    """A file with lines of a name and a number."""
    pairs = (line.split() for line in _lines(path))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _number(path: Path) -> int:
    return next((int(line) for line in _lines(path) if line.strip().isdecimal()), 0)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except (OSError, ValueError):
        return []
