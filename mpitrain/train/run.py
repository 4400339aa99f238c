"""A run's folder, and where a run begins: anew, or from a checkpoint.

RUN/config.toml                     the settings in force
RUN/metrics.jsonl                   a line a step
RUN/checkpoints/step-00000100/      see ckpt
"""

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

    def begin(self, config: Config) -> tuple[Path | None, str]:
        """Make the folder ready; returns the checkpoint to go on from, if any, and a line about it.

        "never" moves an earlier run of this name aside: nothing is deleted. ValueError if a checkpoint that is asked for is not there.
        """
        said = "begins anew"
        start: Path | None = None
        if config.resume == "auto":
            start = ckpt.latest(self.checkpoints)
        elif config.resume == "never":
            if self.checkpoints.exists() or self.metrics.exists():
                aside = next(
                    p for i in range(1, 10**6) if not (p := self.folder.with_name(f"{self.folder.name}.{i}")).exists()
                )
                self.folder.rename(aside)
                said = f"begins anew; the earlier run is now {aside}"
        else:
            start = find_checkpoint(config.resume)
        if start is not None:
            said = f"goes on from {start}"
        if not config.train.eval_only:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            (self.folder / "config.toml").write_text(to_toml(config))
        return start, said


def find_checkpoint(path: str) -> Path:
    """The checkpoint that `path` means: itself, or the newest of a run's folder or of its `checkpoints`.

    CheckpointError (a ValueError) if there is none.
    """
    for folder in (Path(path), Path(path) / "checkpoints"):
        if (newest := ckpt.latest(folder)) is not None:
            return newest
    ckpt.open(path)  # says what is wrong with it
    return Path(path)
