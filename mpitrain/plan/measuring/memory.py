"""The memory that the processes of a node may use."""

import os
from pathlib import Path


def node_bytes(root: Path = Path("/")) -> int:
    """The node's memory, or the smallest limit of the cgroups of this process (version 2, or 1). `root`: of the files, for tests."""
    limits = [_total(root)]
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            folder, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        inner = Path(path.lstrip("/"))
        # Within a container the path may be the host's, which is not there; then the limit is in the top folder.
        for place in (folder, *(folder / above for above in (inner, *inner.parents))):
            limits += [int(text) for text in _lines(place / name) if text.isdecimal()]
    return min(limits)


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
