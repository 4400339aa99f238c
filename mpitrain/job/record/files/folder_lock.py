"""A lock on a folder that one job at a time may write to, on any file system that all nodes see.

    FOLDER/.lock     one JSON object: host, pid, job id, token of the job that holds the lock

The holder touches the file every few seconds: this is its heartbeat. A lock without a heartbeat is stale, and the next job takes it
over. The kernel's file locks (flock, fcntl) do not serve here: many parallel file systems refuse them, or keep them on one node.

No decision compares the clocks of two hosts, except that a lock which is ten minutes old is stale at once. A job that waits for a
heartbeat watches for a change of the file's time. The takeover follows Lamport's fast mutual exclusion (1987): a job writes its name,
waits, and goes on only if its name still stands.
"""

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from ckpt.commit.owner import FolderOwner, owner_of, signature, start_time
from collectives.texts import shown
from mpitrain.files import OddFileError, making, open_regular, read, write_all
from mpitrain.job.record.files.marks import LOCK, MOST_NUMBER, OLD_S, STALE_S, process_space

BEAT_S = 5.0
_MOST_BYTES = 1 << 16
_SETTLE_S = 0.5  # for two jobs that take over the same stale lock at once

_JOB_IDS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "COBALT_JOBID", "JOB_ID")


class LockedError(Exception):
    """Another job holds the lock. `holder`: a description of this job."""

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder


class FolderLock:
    """The lock on `folder`, which must exist. This process holds it until `release`.

    LockedError if a live job holds it, or OSError. `say` gets a line before a wait for a heartbeat, which takes 30 s at most.
    """

    def __init__(
        self, folder: Path, say: Callable[[str], object] = lambda line: None, *, job: str = "", token: str = ""
    ) -> None:
        """`job`: a job whose ranks take the lock over from each other at once, without a look at the heartbeat.

        `token`: see `new_token`.
        """
        self.path = folder / LOCK
        self._job = job
        self.token = token or new_token(job)
        self._say = say
        self._lost = ""
        self._take()
        self._beaten = _now()
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="mpitrain-folder-lock", daemon=True)
        self._thread.start()

    def lost(self) -> str:
        """The description of another process's takeover, or "". It reads the lock, so that a process that slept writes nothing."""
        if not self._lost:
            with contextlib.suppress(OSError):  # while the file system stalls, no job gets the lock
                if _now() - self._beaten > STALE_S / 2 or _token_in(self.path) != self.token:
                    self._touch()
        return self._lost

    def release(self) -> None:
        """Release the lock for other jobs."""
        self._released.set()
        self._thread.join(BEAT_S)  # with a limit, because its file system may hang
        with contextlib.suppress(OSError):
            if _token_in(self.path) == self.token:
                self.path.unlink()

    def let_go(self) -> None:
        """End the heartbeat without a release: the ranks that a loss has left take the lock over."""
        self._released.set()

    def _beat(self) -> None:
        while not self._lost and not self._released.wait(BEAT_S):
            with contextlib.suppress(OSError):
                self._touch()

    def _touch(self) -> None:
        """One heartbeat, if the lock is still this process's."""
        now = _now()
        token = _token_in(self.path)
        if token is None and now - self._beaten < STALE_S and self._create():  # a user has removed the file
            token = self.token
        if token != self.token:
            silent_s = now - self._beaten
            holder = describe(holder_of(self.path))
            self._lost = f"{holder} took over, since this job gave no sign of life for {silent_s:.0f} s"
            return
        os.utime(self.path)
        self._beaten = now

    def _take(self) -> None:
        while not self._create():
            seen = holder_of(self.path)
            if seen is None and not self.path.exists():
                continue  # released meanwhile
            is_own_job = seen is not None and bool(self._job) and seen.token.startswith(f"{self._job}.")
            if not is_own_job:
                self._await_death(seen)
            if holder_of(self.path) != seen:
                continue  # released, or taken over by another job that waited as well
            os.replace(self._write(), self.path)
            if not is_own_job:
                time.sleep(_SETTLE_S)
            if _token_in(self.path) == self.token:
                return

    def _await_death(self, holder: FolderOwner | None) -> None:
        """Return once the lock is stale; LockedError if it is not."""
        if holder is not None and _is_near(holder):
            if not _has_ended(holder):
                raise LockedError(describe(holder))
            return
        with contextlib.suppress(FileNotFoundError):
            before = _changed(self.path)
            if self._file_system_time() - before > OLD_S:
                return
            self._say(f"{self.path} is of {describe(holder)}: waiting up to {STALE_S:.0f} s for its sign of life")
            until = _now() + STALE_S
            while _now() < until:
                time.sleep(min(1.0, BEAT_S / 2))
                if _changed(self.path) != before:
                    raise LockedError(describe(holder_of(self.path)))

    def _create(self) -> bool:
        """Whether there was no lock, so that now it is this process's. A link is exclusive on NFS as well."""
        mine = self._write()
        try:
            os.link(mine, self.path)
        except FileExistsError:
            return _token_in(self.path) == self.token  # NFS repeats a request after a lost answer, and finds our link
        except OSError:  # a file system without links
            try:
                with making(self.path) as file:
                    write_all(file, _record(self.token))
            except FileExistsError:
                return False
        finally:
            mine.unlink(missing_ok=True)
        return True

    def _write(self) -> Path:
        mine = self.path.with_name(f"{LOCK}.{self.token}")
        with making(mine) as file:
            write_all(file, _record(self.token))
        return mine

    def _file_system_time(self) -> float:
        """Now, by the clock that gives files their time, which may be a server's."""
        mine = self._write()
        try:
            return mine.stat().st_mtime
        finally:
            mine.unlink(missing_ok=True)


class Holder:
    """The job that trains in `folder`, as another process sees it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._beat, self._beaten = 0.0, _now()
        self._seen = holder_of(self._path)

    def __str__(self) -> str:
        return describe(self._seen)

    @property
    def token(self) -> str:
        """Of the lock that was seen last: another process of the job may have taken it over; "" if it could not be read."""
        return "" if self._seen is None else self._seen.token

    def is_gone(self) -> str | None:
        """Why no job trains there: it has released its lock, its process has ended, or it gives no sign of life for 30 s. Else None."""
        try:
            beat = _changed(self._path)
            self._seen = holder_of(self._path) or self._seen
        except FileNotFoundError:
            return f"{self._path} is not there"
        except OddFileError as error:
            return f"{self._path} is no lock: {error.strerror}"
        except OSError:  # a file system that stalls is no end
            return None
        if self._seen is not None and _has_ended(self._seen):
            return f"{describe(self._seen)} has ended without releasing {self._path}"
        if beat != self._beat:
            self._beat, self._beaten = beat, _now()
        elif _now() - self._beaten > STALE_S:
            return f"{describe(self._seen)} gives no sign of life"
        return None

    def is_old(self) -> bool:
        """Whether the last heartbeat is so old that no wait for another one is needed, by the clock of this host."""
        with contextlib.suppress(OSError):
            is_near = self._seen is not None and _is_near(self._seen)
            return not is_near and time.time() - _changed(self._path) > OLD_S
        return False


def holder_of(path: Path) -> FolderOwner | None:
    """The holder of the lock at `path`; None without a lock, or if the file cannot be read."""
    try:
        return _owner(read(path, most_bytes=_MOST_BYTES))
    except OSError:
        return None


def _owner(data: bytes) -> FolderOwner | None:
    """The holder in the bytes of a lock; None for a number of a process that no system has."""
    owner = owner_of(data)
    return owner if owner is not None and 0 <= owner.pid < MOST_NUMBER else None


def _is_near(holder: FolderOwner) -> bool:
    """Whether this process sees the holder's in /proc."""
    return holder.place == process_space() and holder.start is not None


def _has_ended(holder: FolderOwner) -> bool:
    """Whether the process has ended for certain. Its start is compared, because another process may have the pid by now."""
    return _is_near(holder) and start_time(holder.pid) != holder.start


def new_token(job: str = "") -> str:
    """What names a holder in the lock."""
    return f"{job}.{uuid.uuid4().hex}"


def owns(folder: Path, token: str, job: str) -> bool:
    """Whether the lock on the folder has this token, or is of another rank of the job, or nobody holds it."""
    with contextlib.suppress(OSError):  # a file system that stalls is no takeover
        there = _token_in(folder / LOCK)
        return there in (None, token) or (bool(job) and there.startswith(f"{job}."))
    return True


def describe(holder: FolderOwner | None) -> str:
    """The holder in words, for a message."""
    if holder is None:
        return "another job"
    job = f" (job {shown(holder.job):.80})" if holder.job else ""
    return f"process {holder.pid} on {shown(holder.host):.80}{job}"


def _record(token: str) -> bytes:
    job = next((os.environ[name] for name in _JOB_IDS if os.environ.get(name)), None)
    return signature(token, place=process_space(), job=job) + b"\n"


def _token_in(path: Path) -> str | None:
    try:
        data = read(path, most_bytes=_MOST_BYTES)
    except FileNotFoundError:
        return None
    owner = _owner(data)
    return owner.token if owner is not None else ""


def _changed(path: Path) -> float:
    """The time of its last heartbeat. The open makes NFS ask its server."""
    fd = open_regular(path)
    try:
        return os.fstat(fd).st_mtime
    finally:
        os.close(fd)


def _now() -> float:
    """A clock that also runs while the host sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
