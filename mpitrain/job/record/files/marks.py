"""The marks by which a run tells its supervisor how far it is. Both sides use this module, so it needs the standard library alone.

    RUN/.alive    {"launch", "phase", "step", "time", "host", "pid"}: under a supervisor rank 0 replaces it at each phase and step
    RUN/.done     {"launch", "reason", "step"}: the run came to its regular end. Removed when a run starts to train
    RUN/.launch   {"launch", "supervisor", "time"}: the last launch, by the supervisor

A launch has a number, which grows over all supervisors of a run; a mark of another launch says nothing about this one. The exit code of
a job says nothing at all: Open MPI's mpirun ends with 0 when a host was lost.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from mpitrain.files import read_object, replace

ALIVE, DONE, LAUNCH = ".alive", ".done", ".launch"
LOCK = ".lock"
"""The name of the file of folder_lock.py."""
STALE_S = 30.0
"""The time without a heartbeat after which that lock is stale. A shorter stall of the file system is harmless."""
OLD_S = 600.0
"""More than the clocks of a cluster's hosts differ: a lock without a heartbeat for so long is stale at once."""

LAUNCH_VARIABLE = "MPITRAIN_LAUNCH"
FOLDER_VARIABLE = "MPITRAIN_MARKS"
"""The run's folder, from the supervisor: so rank 0 can write its first mark before it has read its settings."""
LEASE_VARIABLE = "MPITRAIN_LEASE"
"""The run's lease before the supervisor's first launch (`lease.as_text`): states with a higher number are of its own launches."""
SUPERVISOR_VARIABLE = "MPITRAIN_SUPERVISOR"
"""An id of the supervisor in the environment of all processes of its jobs. It ends the processes that have its id, and no others."""

VARIABLES = (LAUNCH_VARIABLE, FOLDER_VARIABLE, LEASE_VARIABLE, SUPERVISOR_VARIABLE)
"""`collectives.launcher.OF_JOB` has them too: the programs that a rank starts must not."""

Phase = Literal["starting", "training", "saving", "recovering"]
Reason = Literal["finished", "stopped", "refused"]

# Those of collectives/launcher.py, whose package needs more than the standard library.
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
MOST_NUMBER = 2**53
"""Numbers in files are smaller: other programs read them as floats."""
_EVERY_S = 0.5  # a file system of many nodes should not get a file per step


class Alive(NamedTuple):
    """The last sign of life of a launch."""

    launch: int
    phase: Phase
    step: int
    host: str
    pid: int


class Done(NamedTuple):
    """The end of a launch. "stopped": as asked by SIGUSR1. "refused": the settings are wrong, and a relaunch would not help."""

    launch: int
    reason: Reason
    step: int


def launch_number() -> int:
    """The number of this launch; 0 without a supervisor."""
    word = os.environ.get(LAUNCH_VARIABLE, "")
    return int(word) if word.isdigit() else 0


def starting() -> None:
    """The first mark of a process, before its imports. Does something in rank 0 under a supervisor alone."""
    folder = os.environ.get(FOLDER_VARIABLE)
    rank = next((os.environ[name] for name in RANK_VARIABLES if os.environ.get(name)), "0")
    if folder and launch_number() and rank == "0":
        Marks(Path(folder)).alive("starting", 0)


class Marks:
    """Writes the marks of this launch into `folder`, that of a run. With `active` false, as on all ranks but one, it writes nothing.

    `may_write`: whether the folder still belongs to this launch.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, active: bool = True, may_write: Callable[[], bool] = lambda: True
    ) -> None:
        self.folder = Path(folder)
        self._active, self._may_write, self._launch = active, may_write, launch_number()
        self._phase, self._num, self._at = "", 0, 0.0

    def alive(self, phase: Phase, step: int) -> None:
        """The run is in this phase, with so many steps done. Without a supervisor nothing is written. Raises nothing: no run shall fail
        for it; on a full disk the time of the file changes."""
        if not self._active or not self._launch:
            return
        now = time.monotonic()
        self._num = self._num + 1 if self._phase == phase else 1
        if self._num > 2 and now - self._at < _EVERY_S:  # at once: the begin of a phase, and the first step after it
            return
        if not self._may_write():
            return
        self._phase, self._at = phase, now
        mark = {"launch": self._launch, "phase": phase, "step": step, "time": time.time()}
        path = self.folder / ALIVE
        try:
            write(path, mark | {"host": socket.gethostname(), "pid": os.getpid()})
        except OSError:
            with contextlib.suppress(OSError):
                os.utime(path)

    def begin(self) -> None:
        """The run starts to train: remove the mark of an earlier end. OSError if that is impossible."""
        if self._active and self._may_write():
            (self.folder / DONE).unlink(missing_ok=True)

    def done(self, reason: Reason, step: int) -> None:
        """The run has come to its regular end, and all its files are on disk. OSError if the mark cannot be written."""
        # A run that finds nothing left to do changes nothing in its folder.
        if (
            self._active
            and self._may_write()
            and read_done(self.folder, self._launch) != Done(self._launch, reason, step)
        ):
            write(self.folder / DONE, {"launch": self._launch, "reason": reason, "step": step})


def process_space() -> str:
    """The boot of the host and the namespace of process ids: processes with the same one see each other in /proc. "" if not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def refuse() -> None:
    """The settings of the launch are wrong. For rank 0, which may not know its folder; does something under a supervisor alone."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder and launch_number():
        with contextlib.suppress(OSError):
            Marks(Path(folder)).done("refused", 0)


def write(path: Path, mark: dict[str, Any]) -> None:
    """Replace a mark, so that a reader sees the old one or the new one. OSError if that is impossible."""
    replace(path, json.dumps(mark).encode() + b"\n")


def read_alive(folder: Path) -> Alive | None:
    """The last sign of life in a run's folder, of any launch; None without one."""
    try:
        mark = _read(folder / ALIVE)
        launch, step, pid = (whole(mark[name]) for name in ("launch", "step", "pid"))
        return Alive(launch, _one_of(Phase, mark["phase"]), step, str(mark["host"]), pid)
    except (KeyError, ValueError):
        return None


def read_done(folder: Path, launch: int) -> Done | None:
    """The end of this launch, if it came to one."""
    try:
        mark = _read(folder / DONE)
        done = Done(whole(mark["launch"]), _one_of(Reason, mark["reason"]), whole(mark["step"]))
    except (KeyError, ValueError):
        return None
    return done if done.launch == launch else None


def last_launch(folder: Path) -> int:
    """The greatest number of a launch of this run; 0 if it has had none."""
    numbers = [0]
    for name in (LAUNCH, ALIVE, DONE):
        with contextlib.suppress(KeyError, ValueError):
            numbers.append(whole(_read(folder / name)["launch"]))
    return max(numbers)


def is_left_behind(folder: Path) -> bool:
    """Whether the supervisor of this launch has begun a later one. Another supervisor's job has to take the folder's lock first."""
    mark = _read(folder / LAUNCH)
    later = isinstance(launch := mark.get("launch"), int) and launch > launch_number() > 0
    return later and mark.get("supervisor") == os.environ.get(SUPERVISOR_VARIABLE)


def _read(path: Path) -> dict[str, Any]:
    """The object in a file; empty if there is none, or it cannot be read."""
    try:
        return read_object(path)
    except (OSError, ValueError):
        return {}


def whole(value: Any) -> int:
    """A number of a mark. ValueError for anything but a whole number that a run can have."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MOST_NUMBER:
        raise ValueError(f"expected a whole number below {MOST_NUMBER}, got {value!r:.50}")
    return value


def number(value: Any) -> float:
    """A time of a mark. ValueError for anything but a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MOST_NUMBER:
        raise ValueError(f"expected a number, got {value!r:.50}")
    return float(value)


def _one_of(kind: Any, value: Any) -> Any:
    if value not in get_args(kind):
        raise ValueError(f"expected one of {', '.join(get_args(kind))}, got {value!r:.50}")
    return value
