"""A run's folder, and the start of a run: at step 0, or at a checkpoint.

RUN/config.toml                     the settings in force
RUN/metrics.jsonl                   one line per step: see monitor/record/metrics.py
RUN/ranks.jsonl                     one line per step with the figures of all ranks: see monitor/record/ranks.py
RUN/checkpoints/step-00000100/      see ckpt
RUN/events.jsonl                    one line per save, spike, failure, recovery, ...: see monitor/record/events.py
RUN/failure.txt                     the report of the failure that ended the last job, if it failed
RUN/.lock                           the job that trains in it: see folder_lock.py
RUN/.stop                           a request to stop: see stop_request.py
RUN/.lease                          of an elastic run: see elastic/lease.py
"""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import ckpt
import collectives
from ckpt.saving.copies import further_places
from ckpt.storage.catalog import reason_to_keep, step_of
from collectives.launcher import environment_of_program
from collectives.texts import without_secrets
from mpitrain.files import OddFileError, adding, replace
from mpitrain.job.config import Config, ConfigError, FolderInUseError, has_secrets, packed_settings, public, to_toml
from mpitrain.job.elastic.lease import Lease, raise_lease, read_lease
from mpitrain.job.record.files.alerts import Alerts
from mpitrain.job.record.files.events import NAME as EVENTS
from mpitrain.job.record.files.events import write_event
from mpitrain.job.record.files.folder_lock import FolderLock, LockedError, new_token, owns
from mpitrain.job.record.files.marks import LOCK, is_left_behind
from mpitrain.job.train.checkpoints.meta import age_of
from mpitrain.job.train.stop_request import StopRequests


class TrainingRun:
    """The folder of a run. Only rank 0 calls methods that read the disk or write to it, but `may_report` and `write_failure_event`."""

    def __init__(self, config: Config, job: str = "", origin: str = "", first_lease: int = 0) -> None:
        """`job`: the id of this job, whose ranks take the folder over from each other when ranks are lost.

        `origin`: the checkpoint from which this job has started, and starts again after a loss if it has no state of its own, which has
        a lease from `first_lease` on.
        """
        self._job, self._origin, self._first_lease = job, origin, first_lease
        self.folder = Path(config.run)
        self.checkpoints = self.folder / "checkpoints"
        self.metrics = self.folder / "metrics.jsonl"
        self.failure = self.folder / "failure.txt"
        self._lock: FolderLock | None = None  # rank 0's hold on the folder
        self._has_let_go = False
        self.token = new_token(job)
        """Of rank 0's lock on the folder. The other ranks take it over, so that each knows whose the folder is."""
        self._lease: Lease | None = None  # of an elastic run
        self.heard: Callable[[Mapping[str, Any]], object] = lambda event: None
        """Gets each event that rank 0 has written."""
        self.say: Callable[[str], object] = lambda line: None
        """Prints a line on rank 0."""
        self._stop_requests = StopRequests(self.folder)
        self._on_event = config.log.on_event
        self._alerts: Alerts | None = None  # from the first event on
        self.earlier: Lease | None = None
        """The last lease of an earlier run that `prepare` has moved aside."""

    def checkpoint(self, step: int) -> Path:
        """The path of the checkpoint after `step` steps."""
        return self.checkpoints / f"step-{step:08d}"

    def start(self, config: Config) -> tuple[Path | ckpt.Url | None, str]:
        """The checkpoint from which the run continues, if there is one, and a line about it. Changes nothing on disk.

        ValueError if the requested checkpoint does not exist, or if all checkpoints of this run are damaged. OSError if the folder
        cannot be written.
        """
        if not config.train.eval_only:
            self._check_writable()
            packed_settings(to_toml(public(config)))  # an error here, and not at the first save
        copies = config.checkpoint.copies
        self._check_places(config)
        if config.resume == "never":
            return None, "starts at step 0"
        if config.resume != "auto":
            start = ckpt.find(config.resume)
            self._check_way(config, start)
            return start, f"goes on from {start}"
        found = ckpt.list_checkpoints(self.checkpoints) if self.checkpoints.is_dir() else []
        damaged = [checkpoint for checkpoint in found if not checkpoint.complete]
        newest = ckpt.latest(self.checkpoints, copies=copies)
        if newest is None and damaged:
            raise ckpt.CheckpointError(
                f"{damaged[-1].path}: {damaged[-1].problem}; the run has no other checkpoint that is complete. "
                "--resume never starts at step 0 and renames this run's folder"
            )
        if self._origin and (newest is None or age_of(newest).lease < self._first_lease):
            newest = ckpt.find(self._origin)
        self._check_way(config, newest)
        if newest is None:
            return None, "starts at step 0"
        skipped = "".join(f"; {checkpoint.name} is damaged: {checkpoint.problem}" for checkpoint in damaged)
        return newest, f"goes on from {newest}{skipped}"

    def prepare(self, config: Config) -> Path | None:
        """Prepare the folder for training, after all checks. Returns the new folder of an earlier run.

        "never" moves an earlier run of this name to another folder: nothing is deleted.
        """
        aside: Path | None = None
        try:
            if config.resume == "never" and (self.checkpoints.exists() or self.metrics.exists()):
                aside = next(
                    p for i in range(1, 10**6) if not (p := self.folder.with_name(f"{self.folder.name}.{i}")).exists()
                )
                self.release()  # the lock is of the folder, not of its name
                self.earlier = read_lease(self.folder)
                self.folder.rename(aside)
                self.lock()
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.check_lock()
            # With secrets the file is for this user alone.
            replace(self.folder / "config.toml", to_toml(config).encode(), 0o600 if has_secrets(config) else 0o666)
            adding(self.folder / EVENTS).close()  # later on, an event that cannot be written ends no run
        except OSError as error:
            raise self._not_writable(_why(error)) from None
        return aside

    def lock(self, say: Callable[[str], object] = lambda line: None) -> None:
        """Lock the folder, and make it if necessary. FolderInUseError if another job holds the lock. `say`: see FolderLock."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self.folder, say, job=self._job, token=self.token)
            self.failure.unlink(missing_ok=True)  # of an earlier job
        except LockedError as error:
            raise FolderInUseError(
                f"run: {self.folder} is being trained by {error}; wait for its end, or choose another folder with --run"
            ) from None
        except OSError as error:
            raise self._not_writable(_why(error)) from None

    def take_lease(self) -> Lease:
        """Raise the lease of the folder, which this process has locked. OSError if it cannot be written; the error of `check_lock`."""
        self.check_lock()
        self._lease = raise_lease(self.folder)
        return self._lease

    def is_lost(self) -> bool:
        """Whether the folder is another process's now. It reads the files of the lock and of the lease."""
        return self._has_let_go or bool(self._how_lost())

    def is_asked_to_stop(self) -> bool:
        """Whether `python -m mpitrain stop` has asked the job that holds the folder, which is this one."""
        return self._lock is not None and self._stop_requests.are_for(self.token)

    def _how_lost(self) -> str:
        """The description of a takeover by another process, or ""."""
        if self._lock is None:
            return ""
        newest = None
        if self._lease is not None:
            with suppress(OSError):  # a file system that stalls is no takeover
                newest = read_lease(self.folder)
        if self._lease is not None and newest is not None and newest > self._lease and newest.run == self._lease.run:
            return f"its lease has number {newest.number}, and this job has number {self._lease.number}"
        return self._lock.lost()

    def check_lock(self) -> None:
        """RuntimeError if `is_lost`: a job that does not hold the folder writes nothing there."""
        if self._has_let_go:
            raise RuntimeError(f"run: a loss of ranks has ended this save into {self.folder}")
        if how := self._how_lost():
            collectives.set_record_folder(None)
            raise RuntimeError(
                f"run: {self.folder} belongs to another job now: {how}. This job ends without a save; "
                "the other job goes on from the last checkpoint"
            )

    def write_event(self, event: str, **fields: Any) -> None:
        """Append an event to the folder's events, unless the folder `is_lost`. OSError if the file cannot be written."""
        if not self.is_lost():
            written = write_event(self.folder, event, **_public(fields))
            self._alert(written)
            self.heard(written)

    def may_report(self) -> bool:
        """Whether a report of this job belongs into the folder: no later launch and no other job has taken it over. For any rank."""
        if is_left_behind(self.folder) or (self._lock is not None and self.is_lost()):
            return False
        return owns(self.folder, self.token, self._job)

    def write_failure_event(self, report: str) -> None:
        """Append an event about the failure that ends the job; any rank may do so. OSError if the file cannot be written."""
        problem = without_secrets(report.lstrip().partition("\n")[0])
        self._alert(write_event(self.folder, "failure", problem=problem))

    def _alert(self, event: Mapping[str, Any]) -> None:
        """Run the command of log.on_event, if there is one."""
        if self._on_event is None:
            return
        if self._alerts is None:
            self._alerts = Alerts(
                self._on_event, self.folder, lambda text: self.say(text), environment=environment_of_program()
            )
        self._alerts.tell(event)

    def end_alerts(self) -> None:
        """Wait a moment for the commands of the last events."""
        if self._alerts is not None:
            self._alerts.close()

    def is_free(self) -> bool:
        """Whether no job has locked the folder, so that a failure of this one before its own lock may be reported there."""
        return not (self.folder / LOCK).exists()

    def let_go(self) -> None:
        """Leave the lock to the ranks that a loss has left, which take it over. A save in the background does not end after this."""
        self._has_let_go = True
        if self._lock is not None:
            self._lock.let_go()
            self._lock = None

    def release(self) -> None:
        """Unlock the folder, and remove the folder if it is empty."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
            with suppress(OSError):
                self.folder.rmdir()

    def _check_way(self, config: Config, start: Path | ckpt.Url | None) -> None:
        """ConfigError if a later save of this run would replace a folder that must stay."""
        if config.train.eval_only or not self.checkpoints.is_dir():
            return
        try:
            meta = {} if start is None else ckpt.open(start).meta
        except ckpt.CheckpointError:  # loading the checkpoint reports the error, or reads a copy
            return
        after = meta.get("step")
        for path in sorted(self.checkpoints.iterdir()):
            step = step_of(path.name)
            if step is None or path != self.checkpoint(step) or step > config.train.steps:
                continue
            if isinstance(after, int) and step <= after:
                continue
            if reason := reason_to_keep(path):
                raise ConfigError(f"run: {path} {reason}, and this run may replace it later; move it away")

    def _check_places(self, config: Config) -> None:
        """ConfigError if copies cannot be written to their places: a check before the first save."""
        try:
            places = further_places(self.checkpoints, config.checkpoint.copies)
        except ValueError as error:
            raise ConfigError(f"checkpoint.copies: {error}") from None
        if config.resume == "never":
            for place in places:
                with suppress(OSError):  # a place that cannot be reached causes a warning at the first save
                    if (there := ckpt.latest(place)) is not None:
                        # This checkpoint would stay, and the new run would continue from it after a crash.
                        raise ConfigError(
                            f"checkpoint.copies: {there} is there from an earlier run; choose another place, or move it away"
                        )

    def _check_writable(self) -> None:
        """OSError if the folder cannot be written. This check is early, because a large job may take long to reach `prepare`."""
        there = next(
            folder for folder in (self.checkpoints, *self.checkpoints.absolute().parents) if os.path.exists(folder)
        )
        if not there.is_dir():
            raise self._not_writable(f"{there} is no folder")
        if not os.access(there, os.W_OK | os.X_OK):
            raise self._not_writable(f"no permission to write in {there}")

    def _not_writable(self, why: str) -> OSError:
        return OSError(f"run: the folder {self.folder} cannot be written: {why}")


def _why(error: OSError) -> str:
    """The reason, with the name of a file that somebody else has put in the place of the run's own."""
    name = error.filename2 or error.filename
    said = error.strerror or str(error)
    return f"{name}: {said}" if name and isinstance(error, OddFileError | IsADirectoryError) else said


def _public(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: without_secrets(its) if isinstance(its, str) else its for name, its in fields.items()}
