"""A disk that is too small, or that somebody else fills."""

import errno
import os
import random
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.chaos.harms import Harm, Harmer, is_saving
from mpitrain.tools.bench.jobs.job import BenchJob

_WAIT_S = 60.0


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[None]:
    """A file system of that size at the new folder `folder`. PermissionError where this process may not mount one."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", folder], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        raise PermissionError(
            f"{mounted.stderr.strip()}; a small file system needs root: put `unshare --map-root-user --mount` before the command"
        )
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def fills(seconds: float) -> Harmer:
    """Fills the file system of the job's folder during a save, a random one of the first `seconds` after the first step."""

    def harm(job: BenchJob, rng: random.Random) -> Harm | None:
        _filler(job).unlink(missing_ok=True)  # of a trial in which it came too late
        time.sleep(rng.uniform(0.0, seconds))
        if not job.wait_until(lambda: is_saving(job), _WAIT_S, every_s=0.001):
            return None
        harmed = Harm(time.time(), max(job.steps(), default=0))
        with _filler(job).open("wb") as file:
            while free := os.statvfs(job.run.parent).f_bavail:
                try:
                    os.posix_fallocate(file.fileno(), file.tell(), free * os.statvfs(job.run.parent).f_frsize)
                except OSError as error:
                    if error.errno != errno.ENOSPC:  # the job was quicker, and took some of it
                        raise
                file.seek(0, os.SEEK_END)
        return harmed

    return harm


def free_up(job: BenchJob) -> None:
    """Takes back what `fills` has done."""
    _filler(job).unlink()


def _filler(job: BenchJob) -> Path:
    return job.run.with_name("filler")
