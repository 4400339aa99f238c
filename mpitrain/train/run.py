"""A run's folder, and where a run begins: anew, or from a checkpoint.

RUN/config.toml                     the settings in force
RUN/metrics.jsonl                   a line a step
RUN/checkpoints/step-00000100/      see ckpt
"""

import os
from pathlib import Path

import ckpt
from mpitrain.config import Config, to_toml


class Run:
    """The folder of a run. Made by rank 0 alone."""

    def __init__(self, config: Config) -> None:
        self.folder = Path(config.run)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    def checkpoint(self, step: int) -> Path:
        """Where the state after `step` steps is saved."""
        return self.checkpoints / f"step-{step:08d}"

    def start(self, config: Config) -> tuple[Path | None, str]:
        """The checkpoint to go on from, if any, and a line about it. Changes nothing on disk.

        ValueError if a checkpoint that is asked for is not there, or all that this run has are damaged; OSError if the folder cannot
        be written.
        """
        if not config.train.eval_only:
            self._check_writable()
        if config.resume == "never":
            return None, "begins anew"
        if config.resume != "auto":
            start = ckpt.find(config.resume)
            return start, f"goes on from {start}"
        found = ckpt.list_checkpoints(self.checkpoints) if self.checkpoints.is_dir() else []
        complete = [checkpoint for checkpoint in found if checkpoint.complete]
        damaged = [checkpoint for checkpoint in found if not checkpoint.complete]
        if not complete:
            if damaged:
                raise ckpt.CheckpointError(
                    f"{damaged[-1].path}: {damaged[-1].problem}; the run has no other checkpoint that is complete. "
                    "--resume never starts anew and moves this run aside"
                )
            return None, "begins anew"
        skipped = "".join(f"; {checkpoint.name} is damaged: {checkpoint.problem}" for checkpoint in damaged)
        return complete[-1].path, f"goes on from {complete[-1].path}{skipped}"

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
                self.folder.rename(aside)
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            settings = self.folder / ".config.toml.tmp"
            settings.write_text(to_toml(config))
            settings.rename(self.folder / "config.toml")
        except OSError as error:
            raise self._not_writable(error.strerror or str(error)) from None
        return aside

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
