"""What MPI keeps on the hosts of a launch, outside of the run's folder: the folder of mpirun and its daemons, and shared memory.

Open MPI's own choice is a folder named by mpirun's process id. After a kill -9 it stays, and the next mpirun with this id does not
start. By its name alone nobody can tell whose it is. So each launch gets a new folder with a random name, which is removed after it.
"""

import contextlib
import fcntl
import os
import re
import shlex
import shutil
import stat
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from mpitrain.elastic.marks import SUPERVISOR_VARIABLE
from mpitrain.elastic.supervisor.hosts import is_own
from mpitrain.elastic.supervisor.words import Command

PREFIX = "mpitrain-mpi-"
VARIABLES = ("PRTE_MCA_prte_tmpdir_base", "OMPI_MCA_orte_tmpdir_base")
"""In which Open MPI 5 and 4 find the folder."""
_MOST_NAMES = 8
_PARAMETER = re.compile(r"(prte|orte)_(local_|remote_)?tmpdir_base")

CLEAN = r"""
removed=
clean() {
    [ -d "$2" ] && [ ! -L "$2" ] && [ -O "$2" ] || return 0
    (
        cd -P "$2" && { [ -z "$3" ] || [ "$(stat -c %d:%i .)" = "$3" ]; } || exit 1
        rm -rf ompi.* prte* mpitrain-mpi-*
        cd / && rmdir "$2"
    ) 2>/dev/null && removed="$removed $1"
}
"""
"""`clean NUMBER FOLDER [DEVICE:INODE]`: only a folder of this user, and in it only what an mpirun has made."""


@dataclass
class Session:
    """The folder of one launch.

    `place`: its device and inode on this host. `hosts`: those that may have it, besides this one; mpirun's daemons make it there.
    """

    folder: str
    place: str
    hosts: set[str] = field(default_factory=set)
    is_here: bool = True


class Sessions:
    """The folders of a supervisor's launches that have not been removed yet."""

    def __init__(self) -> None:
        self.left: list[Session] = []

    def begin(self, command: Command, environ: Mapping[str, str], hosts: Iterable[str]) -> dict[str, str]:
        """Make the folder of the next launch; returns the settings by which mpirun and its daemons use it. See `make`."""
        session = make(command, environ, hosts)
        if session is None:
            return {}
        self.left.append(session)
        return dict.fromkeys(VARIABLES, session.folder)

    def hosts(self) -> set[str]:
        """The hosts that may have a folder, besides this one."""
        return set().union(*(each.hosts for each in self.left))

    def settle(self, removed: Mapping[str, Iterable[int]]) -> list[str]:
        """Take in the numbers of the folders that were removed on each host that has answered; returns lines about them."""
        lines = []
        for number, session in enumerate(self.left):
            session.is_here = session.is_here and not any(map(is_own, removed))
            session.hosts -= removed.keys()
            names = ["this host" if is_own(host) else host for host, numbers in removed.items() if number in numbers]
            if names:
                where = ", ".join(names) if len(names) <= _MOST_NAMES else f"{len(names)} hosts"
                lines.append(f"removed mpirun's folder {session.folder} on {where}")
        self.left = [each for each in self.left if each.is_here or each.hosts]
        return lines


def make(command: Command, environ: Mapping[str, str], hosts: Iterable[str] = ()) -> Session | None:
    """A new folder for the next launch, in the place that the user has set: by VARIABLES, else TMPDIR, else /tmp.

    None if the launcher is of another MPI, or an option or a file of parameters names a place, or no place can be written to.
    """
    if command.kind in ("mpich", "srun") or _is_set(command, environ):
        return None
    given = next((environ[name] for name in VARIABLES if environ.get(name)), None)
    for root in [given] if given else [environ.get("TMPDIR") or "/tmp", "/tmp", "/var/tmp"]:
        with contextlib.suppress(OSError):
            folder = tempfile.mkdtemp(prefix=PREFIX, dir=os.path.abspath(root))  # with mode 0700
            its = os.stat(folder)
            return Session(folder, f"{its.st_dev}:{its.st_ino}", {host for host in hosts if not is_own(host)})
    return None


def script(sessions: Iterable[Session], host: str) -> str:
    """The lines for a shell on a host that remove its folders of ended launches. The numbers of those removed are in $removed."""
    lines = [
        f"clean {number} {shlex.quote(each.folder)} {each.place if is_own(host) else ''}".rstrip()
        for number, each in enumerate(sessions)
    ]
    return "\n".join([CLEAN, *lines, ""])


def _is_set(command: Command, environ: Mapping[str, str]) -> bool:
    """Whether the user or the site has set the place otherwise than by VARIABLES. Open MPI refuses a place for all hosts beside one for
    some, and its options and files know both."""
    if any(_PARAMETER.fullmatch(word) for word in command.options):
        return True
    names = (name.partition("_MCA_")[2] for name, value in environ.items() if value and name not in VARIABLES)
    if any(_PARAMETER.fullmatch(name) for name in names):
        return True
    launcher = shutil.which(command.launcher) or ""
    places = (
        [Path(launcher).parents[1] / "etc", Path(os.path.realpath(launcher)).parents[1] / "etc"] if launcher else []
    )
    files = [place / f"{name}-mca-params.conf" for place in places for name in ("prte", "openmpi")]
    files += [Path(environ.get("HOME", "/nonexistent")) / name / "mca-params.conf" for name in (".prte", ".openmpi")]
    for file in files:
        with contextlib.suppress(OSError):
            lines = file.read_text(errors="replace").splitlines()
            if any(_PARAMETER.fullmatch(line.partition("=")[0].strip()) for line in lines):
                return True
    return False


# Shared memory. It stays in files of a host if the processes are killed. Only the processes that have them mapped tell which they are,
# so the supervisor looks while the job runs. On other hosts mpirun's daemons remove them.

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

    `since`: the time at which the job was started. An older file is the user's, whatever its name.
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
    try:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError:
        return False
    return True  # closing the file ends the lease
