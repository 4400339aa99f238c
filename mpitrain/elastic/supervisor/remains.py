"""The files that a job keeps on this host outside of its run's folder: shared memory, and the folder of Open MPI's mpirun.

An mpirun that is killed leaves them. Only the processes that have them mapped tell which they are, so the supervisor looks while it
runs. On other hosts mpirun's daemons remove them.
"""

import contextlib
import re
import shutil
from pathlib import Path

from mpitrain.elastic.marks import SUPERVISOR_VARIABLE

_FILES = re.compile(
    r"(/dev/shm/(?:sm_segment|vader_segment|mpich_shm)[^ /]*|/\S*/(?:ompi|prte)\.(?:\d+|[^/ ]+/(?:pid|dvm)\.\d+))(?:/\S*)?$"
)
"""Open MPI 5: /tmp/ompi.PID. Earlier ones: /tmp/ompi.HOST.UID/pid.PID, in a folder that all jobs of the user share."""


def find_files(supervisor: str) -> set[Path]:
    """The files and folders of the processes of a supervisor's jobs on this host."""
    mark = f"{SUPERVISOR_VARIABLE}={supervisor}".encode()
    found: set[Path] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            if mark in (process / "environ").read_bytes().split(b"\0"):
                lines = (process / "maps").read_text(errors="replace").splitlines()
                found |= {Path(match[1]) for line in lines if (match := _FILES.search(line))}
    return found


def remove(files: set[Path]) -> None:
    """Remove what is still there, of a job all of whose processes have ended."""
    for file in files:
        if file.is_dir():
            shutil.rmtree(file, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
