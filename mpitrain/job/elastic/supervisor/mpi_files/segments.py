"""The shared memory of MPI, in files of this host that stay if the processes are killed.

Only the processes that have them mapped tell which they are, so the supervisor looks while the job runs. On other hosts the daemons of
mpirun remove them.
"""

import contextlib
import fcntl
import os
import re
import signal
import stat
from pathlib import Path
from typing import NamedTuple

from mpitrain.job.record.files.marks import SUPERVISOR_VARIABLE

_SEGMENT = re.compile(r"/dev/shm/(?:(?:sm|vader)_segment\.[^/]+\.[0-9a-f]+\.\d+|mpich_shm_[0-9a-f]+_\d+)")
"""Of Open MPI 5 and 4, and of MPICH."""
_CLOCK_S = 0.1  # the times of files lag behind the clock by a tick of the kernel


class Segment(NamedTuple):
    """A file of shared memory, and the inode that a process of the job has mapped."""

    path: str
    inode: int


def find_segments(supervisor: str) -> set[Segment]:
    """The files of the processes of a supervisor's jobs on this host."""
    mark = f"{SUPERVISOR_VARIABLE}={supervisor}".encode()
    found: set[Segment] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            if mark in (process / "environ").read_bytes().split(b"\0"):
                # address, permissions, offset, device, inode, path
                fields = (
                    line.split(maxsplit=5) for line in (process / "maps").read_text(errors="replace").splitlines()
                )
                found |= {
                    Segment(its[5], int(its[4])) for its in fields if len(its) == 6 and _SEGMENT.fullmatch(its[5])
                }
    return found


def remove_segments(segments: set[Segment], since: float) -> None:
    """Remove the files that a job has made and no process has open or mapped any more, in whatever container it runs.

    `since`: the time at which the job was started. A file that has not changed since then is the user's, whatever its name.
    """
    for segment in segments:
        with contextlib.suppress(OSError):
            file = os.open(segment.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                its = os.fstat(file)
                is_own = stat.S_ISREG(its.st_mode) and its.st_uid == os.getuid() and its.st_ino == segment.inode
                if is_own and its.st_ctime > since - _CLOCK_S and _is_unused(file):
                    os.unlink(segment.path)
            finally:
                os.close(file)


def _is_unused(file: int) -> bool:
    """Whether no process has a file open for writing, or mapped so: the kernel then allows a lease."""
    # One that opens it before the end of the lease is announced by a signal: SIGURG, as the usual SIGIO would end this process.
    fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError:
        return False
    return True  # closing the file ends the lease
