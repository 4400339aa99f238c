"""What the supervisor reads and writes in a run's folder, which must be on a file system that all hosts see."""

import contextlib
import json
import os
import re
import time
import uuid
from collections.abc import Hashable
from pathlib import Path

from mpitrain.files import adding, making, read_beginning, read_object, write_all
from mpitrain.job.elastic.lease import as_text, read_lease
from mpitrain.job.elastic.supervisor.texts import public
from mpitrain.job.record.files import marks
from mpitrain.job.record.files.marks import Alive, Done

FAILURE = "failure.txt"
_FIRST_FAILURE = ".failure"  # of ranks that do not know their folder yet; a link to the other one later
_STOP = ".stop"
STOP_VARIABLE, FAILURE_VARIABLE = "MPITRAIN_STOP_FILE", "MPITRAIN_FAILURE_FILE"
VARIABLES = (*marks.VARIABLES, STOP_VARIABLE, FAILURE_VARIABLE)
"""By which the ranks know their supervisor."""


class RunFolder:
    """The folder of a run, of which this process starts the jobs. OSError if it cannot be made."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.path.mkdir(parents=True, exist_ok=True)
        self.launch = marks.last_launch(self.path)
        self.earlier = self._list_checkpoints()
        """the checkpoints that are no own ones"""
        self._lease = read_lease(self.path)
        self._report: Hashable = None

    def prepare(self, supervisor: str) -> dict[str, str]:
        """Begin the next launch; returns the variables for its ranks."""
        self.launch = max(self.launch, marks.last_launch(self.path)) + 1
        mark = {"launch": self.launch, "supervisor": supervisor, "time": time.time()}
        with contextlib.suppress(OSError):  # a full disk must not end the supervisor, which keeps the number as well
            self.path.mkdir(parents=True, exist_ok=True)  # a run may have given its folder another name
            marks.write(self.path / marks.LAUNCH, mark)
        for name in (_STOP, _FIRST_FAILURE):
            with contextlib.suppress(OSError):
                (self.path / name).unlink(missing_ok=True)
        self._report = self._signature_of_report()
        return {
            marks.LAUNCH_VARIABLE: str(self.launch),
            marks.FOLDER_VARIABLE: str(self.path),
            marks.LEASE_VARIABLE: as_text(self._lease),
            marks.SUPERVISOR_VARIABLE: supervisor,
            STOP_VARIABLE: str(self.path / _STOP),
            FAILURE_VARIABLE: str(self.path / _FIRST_FAILURE),
        }

    def ask_to_stop(self) -> None:
        """Ask ranks that cannot hear a signal yet to save and stop."""
        with contextlib.suppress(OSError):
            adding(self.path / _STOP).close()

    def close(self) -> None:
        """Remove what no later reader needs."""
        for name in (_STOP, _FIRST_FAILURE):
            with contextlib.suppress(OSError):
                (self.path / name).unlink(missing_ok=True)

    def sign_of_life(self) -> tuple[Hashable, Alive | None]:
        """The newest mark of life, and what changes with each."""
        try:
            stat = (self.path / marks.ALIVE).stat()
        except OSError:
            return None, None
        alive = marks.read_alive(self.path)
        return (stat.st_mtime_ns, stat.st_ino, alive), alive

    def done(self) -> Done | None:
        """The end of this launch, if it came to one."""
        return marks.read_done(self.path, self.launch)

    def run_id(self) -> str | None:
        """The id of the run, which the names of its copies in node memory have; None if it has none."""
        with contextlib.suppress(OSError):
            lease = read_lease(self.path)
            return None if lease is None else lease.run
        return None

    def report(self) -> Hashable:
        """Changes with each report of a failure of this launch; None without one."""
        signature = self._signature_of_report()
        return signature if signature != self._report else None

    def report_text(self) -> str:
        """The report of this launch's failure, or ""."""
        if self.report() is None:
            return ""
        for name in (_FIRST_FAILURE, FAILURE):
            with contextlib.suppress(OSError):
                # A link is the ranks' own, to the other file.
                file = self.path / (FAILURE if (self.path / name).is_symlink() else name)
                return public(read_beginning(file).rstrip(), lines=True)
        return ""

    def own_start(self) -> str | None:
        """What the setting `resume` must be for a run that shall go on from its own newest checkpoint; None if there is none: one that
        was made since this supervisor began, or is not in `earlier`."""
        own = self._list_own()
        if not own:
            return None
        # An earlier run in this folder may have come further; "auto" would take its checkpoint.
        return (
            "auto"
            if max(own) == max(self._list_checkpoints(), default="")
            else str(self.path / "checkpoints" / max(own))
        )

    def newest_step(self, *, own: bool = False) -> int:
        """The step of the newest checkpoint, or of the newest own one; 0 without one."""
        there = self._list_own() if own else self._list_checkpoints()
        return max((int(name.removeprefix("step-")) for name in there), default=0)

    def _list_own(self) -> list[str]:
        return [name for name, inode in self._list_checkpoints().items() if self.earlier.get(name) != inode]

    def break_lock(self, ended: Alive | None) -> None:
        """Remove the lock of an ended launch, or make it stale at once, if its rank 0 holds it.

        Rank 0 was on this host and is gone: nobody holds the lock, and the next job need not settle with others who takes it over.

        A job on another host cannot see that the holder is dead, and would wait for half a minute. The holder may live, on a host that
        does not answer: it finds another token in the lock, and ends without a write (monitor/record/folder_lock.py).
        """
        path = self.path / marks.LOCK
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = read_object(path)
            if ended is None or (record["host"], record["pid"]) != (ended.host, ended.pid):
                return
            if record["place"] == marks.process_space() != "" and not Path(f"/proc/{record['pid']}").exists():
                path.unlink()
                return
            record |= {"token": uuid.uuid4().hex, "place": ""}
            mine = path.with_name(f"{marks.LOCK}.{record['token']}")
            with making(mine) as file:
                write_all(file, json.dumps(record).encode() + b"\n")
            os.utime(mine, (0, 0))  # a lock that is ten minutes old is stale
            mine.replace(path)

    def _signature_of_report(self) -> Hashable:
        for name in (_FIRST_FAILURE, FAILURE):
            with contextlib.suppress(OSError):
                stat = (self.path / name).stat()
                if stat.st_size:
                    return stat.st_ino, stat.st_mtime_ns, stat.st_size
        return None

    def _list_checkpoints(self) -> dict[str, int]:
        """The checkpoints by name; a new one has another inode."""
        found = {}
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.path / "checkpoints"):
                if re.fullmatch(r"step-\d{8,}", entry.name):
                    found[entry.name] = entry.inode()
        return found
