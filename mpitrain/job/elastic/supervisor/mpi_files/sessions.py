"""The folders of mpirun and its daemons on the hosts of a launch: a new one for each launch, which is removed after it.

Open MPI's own choice is a folder named by mpirun's process id. After a kill -9 it stays, and the next mpirun with this id does not
start. By its name alone nobody can tell whose it is. So each launch gets a folder with a random name.
"""

import contextlib
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from mpitrain.job.elastic.supervisor.hosts import is_own
from mpitrain.job.elastic.supervisor.words import Command

PREFIX = "mpitrain-mpi-"
PLACE_PREFIX = "mpitrain-mpis-"
"""How the names of temporary places begin in which several mpiruns have their folders."""
VARIABLES = ("PRTE_MCA_prte_tmpdir_base", "OMPI_MCA_orte_tmpdir_base")
"""In which Open MPI 5 and 4 find the folder."""
_HERE = "this host"
_MOST_NAMES = 8
_UNKNOWN_HOSTS = ("LSB_JOBID", "PE_HOSTFILE")
"""In jobs of LSF and of Grid Engine mpirun knows the hosts alone."""
_USUAL = ("/tmp", "/var/tmp")

# A program that a rank has started may be an mpirun itself, and use the folder that it was told: what is in it then stays as long as a
# process has its name. Processes that end take a moment. All folders have one such moment: a host must answer in a few seconds. Without
# a grep that can tell, a folder is in use. Its exit code tells nothing: the environments of other users' processes cannot be read.
CLEAN = rf"""
rounds=5
used() {{
    [ -r /proc/$$/environ ] && printf 'a\0b\0' | grep -qxzF b || return 0
    [ -n "$(grep -lsxzF -e "{VARIABLES[0]}=$1" -e "{VARIABLES[1]}=$1" /proc/[0-9]*/environ)" ]
}} 2>/dev/null
unused() {{
    while used "$1"; do
        [ "$rounds" -gt 0 ] || return 1
        rounds=$((rounds - 1))
        sleep 0.2
    done
}}
emptied() (
    cd -P "$1" && {{ [ -z "$2" ] || [ "$(stat -c %d:%i .)" = "$2" ]; }} || exit 1
    rm -rf ompi.* prte*
    cd / && rmdir "$1"
) 2>/dev/null
clean() {{
    [ -d "$2" ] && [ ! -L "$2" ] && [ -O "$2" ] || return 0
    [ -z "$3" ] || [ "$(stat -c %d:%i "$2")" = "$3" ] || return 0
    if rmdir "$2" 2>/dev/null || {{ unused "$2" && emptied "$2" "$3"; }}; then
        removed="$removed $1"
    elif [ -d "$2" ]; then
        kept="$kept $1"
    fi
}}
"""
"""`clean NUMBER FOLDER [DEVICE:INODE]`: only a folder of this user, and in it only what an mpirun has made."""


class CleanedFolders(NamedTuple):
    """The numbers of the folders that were removed on a host, and of those that are there and could not be."""

    removed: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()


@dataclass
class SessionFolder:
    """The folder of one launch.

    `inode`: its device and inode on this host. `hosts`: those that may have it; mpirun's daemons make it on others than this one.
    `kept`: those of them on which it is, and could not be removed.
    """

    folder: str
    inode: str
    hosts: set[str] = field(default_factory=lambda: {_HERE})
    kept: set[str] = field(default_factory=set)


class Sessions:
    """The folders of a supervisor's launches that have not been removed yet."""

    def __init__(self) -> None:
        self.left: list[SessionFolder] = []

    def begin(self, command: Command, environ: Mapping[str, str], hosts: Iterable[str]) -> dict[str, str]:
        """Make the folder of the next launch; returns the settings by which mpirun and its daemons use it. See `make`."""
        session = make(command, environ, hosts)
        if session is None:
            return {}
        self.left.append(session)
        return dict.fromkeys(VARIABLES, session.folder)

    def hosts(self) -> set[str]:
        """The hosts that may have a folder, besides this one."""
        return set().union(*(each.hosts for each in self.left)) - {_HERE}

    def settle(self, answers: Mapping[str, CleanedFolders]) -> list[str]:
        """Take in what each host has answered that was asked about the folders in `left`; returns lines about those removed."""
        lines = []
        for number, session in enumerate(self.left):
            kept = {_name(host) for host, found in answers.items() if number in found.kept}
            session.kept = kept | session.kept - set(map(_name, answers))
            session.hosts = session.hosts - set(map(_name, answers)) | kept
            if names := [_name(host) for host, found in answers.items() if number in found.removed]:
                lines.append(f"removed mpirun's folder {session.folder} on {_listed(names)}")
        self.left = [each for each in self.left if each.hosts]
        return lines

    def remaining(self) -> Iterator[str]:
        """Lines about the folders that are left, for the end."""
        for each in self.left:
            if each.kept:
                yield (
                    f"mpirun's folder {each.folder} stays on {_listed(sorted(each.kept))}: it has other files, or a living process "
                    "has its name in the environment"
                )
            if silent := sorted(each.hosts - each.kept):
                yield f"mpirun's folder {each.folder} may stay on {_listed(silent)}: not reached"


def _name(host: str) -> str:
    return _HERE if is_own(host) else host


def _listed(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= _MOST_NAMES else f"{len(names)} hosts"


def make(command: Command, environ: Mapping[str, str], hosts: Iterable[str] = ()) -> SessionFolder | None:
    """A new folder for the next launch, in the place that the user has set by VARIABLES, else in the usual one.

    The usual place is TMPDIR for a launch on this host alone. Other hosts, on which daemons make the folder, may lack it. Then, and
    where TMPDIR cannot be written to, it is /tmp.

    None if the launcher is of another MPI, or an option or a file of parameters names a place, or no place can be written to.
    """
    if command.kind in ("mpich", "srun") or _is_set(command, environ):
        return None
    hosts = list(hosts)
    others = {host for host in hosts if not is_own(host)}
    is_known = command.kind == "openmpi" and not any(map(environ.get, _UNKNOWN_HOSTS))
    is_here = is_known and not others and (bool(hosts) or not _has_default_hosts(command))
    for place in _places(environ, is_here=is_here):
        with contextlib.suppress(OSError):
            folder = tempfile.mkdtemp(prefix=PREFIX, dir=os.path.abspath(place))  # with mode 0700
            its = os.stat(folder)
            return SessionFolder(folder, f"{its.st_dev}:{its.st_ino}", others | {_HERE})
    return None


def _has_default_hosts(command: Command) -> bool:
    """Whether the site has told this mpirun hosts, which it takes without any in its words."""
    files = (etc / f"{name}-default-hostfile" for etc in _settings_of_site(command) for name in ("prte", "openmpi"))
    with contextlib.suppress(OSError):
        return any(re.search(r"^\s*[^#\s]", file.read_text(errors="replace"), re.M) for file in files if file.is_file())
    return False


def _places(environ: Mapping[str, str], *, is_here: bool) -> list[str]:
    given = next((environ[name] for name in VARIABLES if environ.get(name)), None)
    if given and not (path := Path(given)).name.startswith(PREFIX):
        return [given]
    if given:
        # The folder of another launch, of which this process is a part. It is removed at that launch's end, and this one may go on. The
        # other launch was perhaps on its host alone, in that host's TMPDIR.
        is_everywhere = is_here or path.parent != Path(environ.get("TMPDIR") or path.parent / "other")
        return [*([str(path.parent)] if is_everywhere else []), *_USUAL]
    return [*filter(None, [environ.get("TMPDIR") if is_here else None]), *_USUAL]


def script(sessions: Iterable[SessionFolder], host: str) -> str:
    """The lines for a shell on a host that remove its folders of ended launches. The numbers of those removed are in $removed, of those
    that are there and could not be in $kept."""
    new: list[str] = []
    kept: list[str] = []
    for number, each in enumerate(sessions):
        line = f"clean {number} {shlex.quote(each.folder)} {each.inode if is_own(host) else ''}".rstrip()
        (kept if _name(host) in each.kept else new).append(line)
    return "\n".join([CLEAN, *new, "rounds=0", *kept, ""])  # no moment for what has stayed once


# Places that are set otherwise. Open MPI refuses a place for all hosts beside one for some, and its options and files know both.

_PARAMETER = re.compile(r"(?:prte|orte)_(?:local_|remote_)?tmpdir_base")
_IN_FILE = re.compile(rf"^[^#\n]*\b{_PARAMETER.pattern}\b", re.MULTILINE)
_FILE_OPTIONS = ("tune", "am")
_FILE_VARIABLE = re.compile(r"(?:PRTE|OMPI)_MCA_mca_base_(?:param_files|param_file_prefix|envar_file_prefix)")
"""Variables with names of such files; the last two are those of the options."""


def _is_set(command: Command, environ: Mapping[str, str]) -> bool:
    """Whether the user or the site has set the place otherwise than by VARIABLES."""
    if any(_PARAMETER.fullmatch(word) for word in command.options):
        return True
    names = (name.partition("_MCA_")[2] for name, value in environ.items() if value and name not in VARIABLES)
    if any(_PARAMETER.fullmatch(name) for name in names):
        return True
    for file in _parameter_files(command, environ):
        with contextlib.suppress(OSError):
            if file.is_file() and _IN_FILE.search(file.read_text(errors="replace")):
                return True
    return False


def _parameter_files(command: Command, environ: Mapping[str, str]) -> Iterator[Path]:
    """The files that an mpirun may take parameters from: of the site, of the user, and those that options and variables name."""
    yield from (etc / f"{name}-mca-params.conf" for etc in _settings_of_site(command) for name in ("prte", "openmpi"))
    home = Path(environ.get("HOME", "/nonexistent"))
    yield from (home / name / "mca-params.conf" for name in (".prte", ".openmpi"))
    lists = [command.option(f"{dash}{name}") for name in _FILE_OPTIONS for dash in ("-", "--")]
    lists += [value for name, value in environ.items() if _FILE_VARIABLE.fullmatch(name)]
    yield from (Path(name) for text in lists if text for name in re.split("[:,]", text) if name)


def _settings_of_site(command: Command) -> Iterator[Path]:
    """The folders in which an mpirun may have settings of the site."""
    launcher = shutil.which(command.launcher)
    prefixes = {Path(path).parents[1] for path in (launcher, os.path.realpath(launcher))} if launcher else set()
    for prefix in prefixes:
        yield prefix / "etc"
        if prefix.is_relative_to("/usr"):  # the packages of distributions
            yield from (place for name in ("openmpi*", "prte*") for place in Path("/etc").glob(name))
