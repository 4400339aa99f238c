"""Finds what dead jobs have left on a host, but for copies of the state. Nothing is removed here."""

import os
import re
import stat
import time
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from tempfile import gettempdir

from collectives.environment import memory_folder
from mpitrain.job.elastic.copies.folders import own_folders
from mpitrain.job.elastic.copies.holding import locked
from mpitrain.job.elastic.supervisor.mpi_files.sessions import PLACE_PREFIX, PREFIX, VARIABLES

_LEFT_S = 60.0  # a younger file may belong to a rank that is just making it


def size_of(path: Path) -> int | None:
    """The bytes that a file, or a folder with all in it, takes; None if it is gone."""
    try:
        its = path.lstat()
        inside = os.walk(path) if stat.S_ISDIR(its.st_mode) else ()
        below = [os.path.join(folder, name) for folder, folders, files in inside for name in (*folders, *files)]
        return (its.st_blocks + sum(os.lstat(each).st_blocks for each in below)) * 512
    except OSError:
        return None


def unused_packs() -> list[Path]:
    """This user's unpacked environments in which no process runs, and the remains of unpackings and removals that were killed."""
    chosen = os.environ.get("MPITRAIN_PACK_DIR")
    found: list[Path] = []
    for own in own_folders("mpitrain-pack", Path(chosen) if chosen else None):
        with _alone(own) as is_free, suppress(OSError):  # else a process unpacks or removes now
            for path in sorted(path for path in own.iterdir() if path.is_dir()):
                if path.name.startswith(".new.") or path.name.endswith(".dead"):
                    found += [path] * is_free
                else:
                    with _alone(path) as is_unused:
                        found += [path] * is_unused
    return found


def _alone(folder: Path) -> AbstractContextManager[bool]:
    """Lock a folder in the block, as packs do. The value: whether no process locks it."""
    return locked(partial(os.open, folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))


def dead_sessions() -> list[Path]:
    """This user's folders of mpiruns of Open MPI of which no process is seen here: mpitrain-mpi-NAME, which our scripts and the
    supervisor make, mpitrain-mpis-NAME of chaos, and Open MPI 5's own ompi.PID."""
    found: list[Path] = []
    ours: list[Path] = []
    for place in {gettempdir(), "/tmp", *filter(None, map(os.environ.get, VARIABLES))}:
        for path in Path(place).glob("*"):
            with suppress(OSError):
                its = path.lstat()
                if its.st_uid != os.getuid() or not stat.S_ISDIR(its.st_mode):
                    continue
                _, is_open_mpi, pid = path.name.partition("ompi.")
                if path.name.startswith((PREFIX, PLACE_PREFIX)) and time.time() - its.st_mtime > _LEFT_S:
                    ours.append(path)
                elif is_open_mpi and path.name == f"ompi.{pid}" and pid.isdigit() and not Path("/proc", pid).exists():
                    found.append(path)
    for process in Path("/proc").glob("[0-9]*") if ours else ():
        with suppress(OSError):
            its_words = (process / "environ").read_bytes()
            ours = [path for path in ours if os.fsencode(path) not in its_words]
    return sorted(found + ours)


def unused_files() -> list[Path]:
    """This user's files of MPI and of this library in the folder of node memory that no process maps or holds open.

    Also the folders, each with a socket, of ranks that have ended while they joined the ring.
    """
    known = re.compile(r"mpitrain-(\d+)-[0-9a-f]{32}|(?:vader|sm)_segment\..*|psm[23]?_shm.*|mpich_shar_tmp.*")
    candidates, folders = [], []
    with suppress(OSError):
        for entry in os.scandir(memory_folder()):
            with suppress(OSError):
                its, name = entry.stat(follow_symlinks=False), known.fullmatch(entry.name)
                if name is None or its.st_uid != os.getuid() or time.time() - its.st_mtime <= _LEFT_S:
                    continue
                if stat.S_ISREG(its.st_mode):
                    candidates.append(Path(entry.path))
                elif stat.S_ISDIR(its.st_mode) and name[1] and not Path("/proc", name[1]).exists():
                    folders.append(Path(entry.path))
    if not candidates:
        return sorted(folders)
    used: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            used |= {line.split(maxsplit=5)[5].strip() for line in (process / "maps").open() if "/" in line}
            used |= {os.readlink(link) for link in (process / "fd").iterdir()}
    return sorted([*folders, *(path for path in candidates if os.path.realpath(path) not in used)])
