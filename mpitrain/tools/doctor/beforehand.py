"""Compares the sources of the ranks before MPI starts, by files in the run's folder: ranks of two versions may stand still in MPI.

Ranks that do not see this folder, or whose version writes no such file, are compared when MPI has started: see `collectives.world()`.
"""

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from collectives.launcher import Daemon, job_name
from collectives.version import release, sources
from mpitrain.tools.doctor.findings import Finding, Level, names

_WAIT_S = 3.0  # for the files of the other ranks
_NAP_S = 0.01
_SLACK_S = 5.0  # between the starts of a job's daemons on its hosts
LIMIT_S = _WAIT_S + 5.0
"""The longest time of a comparison whose disk answers."""


class Sources(NamedTuple):
    """The sources of a rank: version and commit, a hash, their folder, and the host."""

    release: str
    code: str
    folder: str
    host: str


def own_sources() -> Sources:
    """The sources of this process."""
    folder = str(Path(__file__).resolve().parents[3])
    return Sources(str(release()), sources().hex(), folder, os.uname().nodename)


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists, as far as this process may see."""
    place = folder.absolute()
    while not _exists(place) and place != place.parent:
        place = place.parent
    return place


def _exists(place: Path) -> bool:
    with suppress(OSError):  # a name that is too long, or a folder that this user may not enter
        return place.exists()
    return False


class Beforehand:
    """The files of the ranks of this job. `compare` may hang with the disk."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self._folder, self._rank, self._size = folder, rank, size
        self._files: list[Path] = []  # those of all ranks, when this rank has written its own

    def compare(self) -> Finding | None:
        """What is wrong with the sources of the ranks, as far as this rank sees them; None if nothing is."""
        if not job_name() or self._size == 1:
            return None
        job = hashlib.blake2b(job_name().encode(), digest_size=8).hexdigest()
        place = existing(self._folder)
        files = [place / f".mpitrain-doctor-{job}-{each}" for each in range(self._size)]
        mine = files[self._rank]
        part = mine.with_name(mine.name + ".part")
        try:
            part.write_text(json.dumps(own_sources()))
            part.rename(mine)
            # A run of the same name that was killed may have left files. The disk's clock may be another one.
            began = mine.stat().st_mtime - Daemon().age_s() - _SLACK_S
        except OSError:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            return None  # as rank 0, which does not see this rank
        self._files = files
        found: dict[int, Sources] = {}
        end = time.monotonic() + _WAIT_S
        while not self._look(found, began) and time.monotonic() < end:
            time.sleep(_NAP_S)
        finding = judge(found)
        if self._rank == 0 and len(found) < self._size and finding is None:
            mine.unlink()  # it goes on into MPI; so must a rank that comes later, and `world()` compares them
        return finding

    def is_reported(self) -> bool:
        """On a rank that has found a difference: wait until rank 0 has reported it, or goes on into MPI, as this rank must then."""
        first, mine = self._files[0], self._files[self._rank]
        while mine.exists() and first.exists():
            time.sleep(_NAP_S)
        return not mine.exists()

    def _look(self, found: dict[int, Sources], began: float) -> bool:
        """Add the files that are there and were written since `began`. Returns whether those of all ranks are."""
        for rank in set(range(self._size)) - set(found):
            with suppress(OSError, ValueError, TypeError):  # no file, or none of this form
                if self._files[rank].stat().st_mtime >= began:
                    found[rank] = Sources(*json.loads(self._files[rank].read_text()))
        return len(found) == self._size

    def close(self) -> None:
        """Remove this rank's file, on rank 0 those of all ranks. At the end, when the other ranks have read it."""
        for file in reversed(self._files) if self._rank == 0 else self._files[self._rank :][:1]:  # see `is_reported`
            with suppress(OSError):
                file.unlink(missing_ok=True)


def judge(found: dict[int, Sources]) -> Finding | None:
    """The finding about ranks whose sources differ from those of rank 0; None if all are equal, or rank 0 has written no file."""
    strangers = [rank for rank in sorted(found) if 0 in found and found[rank][:2] != found[0][:2]]
    if not strangers:
        return None
    places = names([f"rank {rank} on {found[rank].host}" for rank in strangers])
    theirs, ours = found[strangers[0]], found[0]
    return Finding(
        Level.ERROR,
        "mpitrain",
        f"its sources on {places} ({theirs.release} in {theirs.folder}) differ from those on rank 0 on {ours.host} ({ours.release} in "
        f"{ours.folder})",
        "the same sources everywhere: ranks must issue the same collectives",
        "install the same commit on all hosts, and see that PYTHONPATH and the environment are the same there",
        group="Installation",
    )
