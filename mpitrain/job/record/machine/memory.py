"""The memory that the processes of a node may use."""

import os
from pathlib import Path

from collectives.cgroup import groups_of, smallest_limit


def node_bytes(root: Path = Path("/")) -> int:
    """The node's memory, or the smallest limit of the cgroups of this process (version 2, or 1). `root`: of the files, for tests."""
    total, limit = _total(root), smallest_limit(groups_of(root=root))
    return total if limit is None else min(total, limit)


def own_bytes() -> int:
    """The memory that this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _total(root: Path) -> int:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
