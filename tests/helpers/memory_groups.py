"""A cgroup with a limit of memory, for jobs whose processes the kernel's OOM killer ends."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from collectives.cgroup import groups_of

_WAIT_S = 10.0


class LimitedGroup:
    """A group below that of this process. Its commands run in groups of their own in it, as the tasks of a step of Slurm."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def enter(self, task: str) -> list[str]:
        """The words before a command that let it run in the inner group of the name `task`, in which sh replaces $."""
        script = f'mkdir -p {self.folder}/{task} && echo $$ > {self.folder}/{task}/cgroup.procs && exec "$@"'
        return ["sh", "-c", script, "sh"]


@contextmanager
def limited_group(nbytes: int) -> Iterator[LimitedGroup]:
    """A group whose processes may have `nbytes` together, without swap. Skips the test where this process may make none."""
    groups = groups_of()
    if not groups:
        pytest.skip("no cgroup that accounts for memory is seen here")
    is_first = (groups[0] / "memory.limit_in_bytes").exists()
    # In version 2 a group with processes can have no groups below it with limits, but its neighbours can be made.
    at = groups[-1] if is_first else groups[0].parent
    folder = at / f"mpitrain-test-{os.getpid()}-{time.monotonic_ns()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made in {at}: {error.strerror}")
    try:
        try:
            for name in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes") if is_first else ("memory.max",):
                if name == "memory.max" or (folder / name).exists():
                    (folder / name).write_text(str(nbytes))
            if not is_first:
                (folder / "cgroup.subtree_control").write_text("+memory")
                (folder / "memory.swap.max").write_text("0")
        except OSError as error:
            pytest.skip(f"the limit of a cgroup in {at} cannot be set: {error.strerror}")
        yield LimitedGroup(folder)
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    """Remove the groups, once their processes have ended."""
    until = time.monotonic() + _WAIT_S
    while folder.exists() and time.monotonic() < until:
        for each in (*(inner for inner in folder.iterdir() if inner.is_dir()), folder):
            with suppress(OSError):  # a process is just ending
                each.rmdir()
        time.sleep(0.02)
