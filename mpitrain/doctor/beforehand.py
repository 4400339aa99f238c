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

from collectives.launcher import job_name
from collectives.version import release, sources
from mpitrain.doctor.findings import Finding, Level, names

_WAIT_S = 3.0  # for the files of the other ranks
_NAP_S = 0.01


class Sources(NamedTuple):
    """The sources of a rank: version and commit, a hash, their folder, and the host."""

    release: str
    code: str
    folder: str
    host: str


def own_sources() -> Sources:
    """The sources of this process."""
    folder = str(Path(__file__).resolve().parents[2])
    return Sources(str(release()), sources().hex(), folder, os.uname().nodename)


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return place


class Beforehand:
    """The files of the ranks of this job."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        job = hashlib.blake2b(job_name().encode(), digest_size=8).hexdigest()
        self._files = [existing(folder) / f".mpitrain-doctor-{job}-{each}" for each in range(size)]
        self._rank = rank

    def compare(self) -> Finding | None:
        """What is wrong with the sources of the ranks, as far as this rank sees them; None if nothing is."""
        if not job_name() or len(self._files) == 1:
            return None
        mine = self._files[self._rank]
        with suppress(OSError):
            part = mine.with_name(mine.name + ".part")
            part.write_text(json.dumps(own_sources()))
            part.rename(mine)
        found: dict[int, Sources] = {}
        end = time.monotonic() + _WAIT_S
        while len(found) < len(self._files) and time.monotonic() < end:
            for rank in set(range(len(self._files))) - set(found):
                with suppress(OSError):
                    found[rank] = Sources(*json.loads(self._files[rank].read_text()))
            time.sleep(_NAP_S)
        return judge(found)

    def close(self) -> None:
        """Remove this rank's file, on rank 0 those of all ranks. At the end, when the other ranks have read it."""
        for file in self._files if self._rank == 0 else [self._files[self._rank]]:
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
