"""The folder in which a launch's mpirun and its daemons on other hosts keep their files.

Open MPI's own choice is a folder named by mpirun's process id. After a kill -9 it stays, and the next mpirun with this id does not
start. By its name alone nobody can tell whose it is. So each launch gets a new folder with a random name, which is removed after it.
"""

import contextlib
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

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
