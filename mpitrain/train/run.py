"""A run's folder, and where a run begins: at step 0, or at a checkpoint.

RUN/config.toml                     the settings in force
RUN/metrics.jsonl                   a line a step
RUN/checkpoints/step-00000100/      see ckpt
RUN/.lock                           the job that trains in it: see folder_lock.py
"""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import ckpt
from ckpt.saving.copies import further_places
from ckpt.storage.catalog import reason_to_keep, step_of
from mpitrain.config import Config, ConfigError, to_toml
from mpitrain.train.folder_lock import FolderLock, LockedError


class Run:
    """The folder of a run. What looks at the disk, or writes there, is rank 0's to call."""

    def __init__(self, config: Config) -> None:
        self.folder = Path(config.run)
        self._lock: FolderLock | None = None  # rank 0's hold on the folder

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    def checkpoint(self, step: int) -> Path:
        """Where the state after `step` steps is saved."""
        return self.checkpoints / f"step-{step:08d}"

    def start(self, config: Config) -> tuple[Path | ckpt.Url | None, str]:
        """The checkpoint to go on from, if any, and a line about it. Changes nothing on disk.

        ValueError if a checkpoint that is asked for is not there, or all that this run has are damaged; OSError if the folder cannot
        be written.
        """
        if not config.train.eval_only:
            self._check_writable()
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
                "--resume never starts anew and moves this run aside"
            )
        self._check_way(config, newest)
        if newest is None:
            return None, "starts at step 0"
        skipped = "".join(f"; {checkpoint.name} is damaged: {checkpoint.problem}" for checkpoint in damaged)
        return newest, f"goes on from {newest}{skipped}"

    def prepare(self, config: Config) -> Path | None:
        """Make the folder ready to be trained in, once all else is known to be right; returns where an earlier run now is.

        "never" moves a run of this name aside: nothing is deleted.
        """
        aside: Path | None = None
        try:
            if config.resume == "never" and (self.checkpoints.exists() or self.metrics.exists()):
                aside = next(
                    p for i in range(1, 10**6) if not (p := self.folder.with_name(f"{self.folder.name}.{i}")).exists()
                )
                self.release()  # the lock is of the folder, not of its name
                self.folder.rename(aside)
                self.lock()
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            settings = self.folder / ".config.toml.tmp"
            settings.write_text(to_toml(config))
            settings.rename(self.folder / "config.toml")
        except OSError as error:
            raise self._not_writable(error.strerror or str(error)) from None
        return aside

    def lock(self, say: Callable[[str], object] = lambda line: None) -> None:
        """Keep other jobs out of the folder, which is made if need be. ConfigError if a job trains in it; `say`: see FolderLock."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self.folder, say)
        except LockedError as error:
            raise ConfigError(
                f"run: {self.folder} is being trained by {error}; wait for its end, or name another by --run"
            ) from None
        except OSError as error:
            raise self._not_writable(error.strerror or str(error)) from None

    def is_lost(self) -> bool:
        """Whether another job took the folder over. For every step: it takes no look at the disk while the lock's heart beats."""
        return self._lock is not None and bool(self._lock.lost())

    def check_lock(self) -> None:
        """RuntimeError if `is_lost`: a job that does not hold the folder writes nothing there."""
        if self._lock is not None and (how := self._lock.lost()):
            raise RuntimeError(
                f"run: {self.folder} is another job's now: {how}. This job ends without a save; "
                "the other one goes on from what was saved before"
            )

    def release(self) -> None:
        """Let other jobs into the folder again; one with nothing in it goes."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
            with suppress(OSError):
                self.folder.rmdir()

    def _check_way(self, config: Config, start: Path | ckpt.Url | None) -> None:
        """Whether the checkpoints of the steps to come can have their places, which only those of an earlier run give free."""
        if config.train.eval_only or not self.checkpoints.is_dir():
            return
        try:
            meta = {} if start is None else ckpt.open(start).meta
        except ckpt.CheckpointError:  # which loading it will tell, or a copy makes good
            return
        after = meta.get("step")
        for path in sorted(self.checkpoints.iterdir()):
            step = step_of(path.name)
            if step is None or path != self.checkpoint(step) or step > config.train.steps:
                continue
            if isinstance(after, int) and step <= after:
                continue
            if reason := reason_to_keep(path):
                raise ConfigError(f"run: {path} {reason}, and this run may come to replace it; move it away")

    def _check_places(self, config: Config) -> None:
        """Whether copies can go where they are to: early, not at the first save."""
        try:
            places = further_places(self.checkpoints, config.checkpoint.copies)
        except ValueError as error:
            raise ConfigError(f"checkpoint.copies: {error}") from None
        if config.resume == "never":
            for place in places:
                with suppress(OSError):  # away: that is a warning when it is to be written
                    if (there := ckpt.latest(place)) is not None:
                        # Nothing moves it aside, and after a crash the new run would go on from it.
                        raise ConfigError(
                            f"checkpoint.copies: {there} is there from an earlier run; name another place, or move it away"
                        )

    def _check_writable(self) -> None:
        """Early, because what comes before `prepare` may take long on a large job."""
        there = next(
            folder for folder in (self.checkpoints, *self.checkpoints.absolute().parents) if os.path.exists(folder)
        )
        if not there.is_dir():
            raise self._not_writable(f"{there} is no folder")
        if not os.access(there, os.W_OK | os.X_OK):
            raise self._not_writable(f"no permission to write in {there}")

    def _not_writable(self, why: str) -> OSError:
        return OSError(f"run: the folder {self.folder} cannot be written: {why}")
