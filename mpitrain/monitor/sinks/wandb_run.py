"""A run in Weights & Biases. It is called by program.py alone."""

import errno
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpitrain.files import OddFileError, blocks_of_lines, check_own, open_regular
from mpitrain.monitor.sinks.sink import About

_MOST_ROWS = 1_000_000
"""Of steps that are computed again."""


class WandbRun:
    """The run in the project `About.project`. Its files are in RUN/wandb. W&B's own variables apply, such as WANDB_MODE=offline.

    W&B numbers rows by itself, and cannot take rows back. A step that is computed again after a crash has the same bits, so its row is
    left out: `RUN/wandb.rows` has the losses of the rows that W&B has. If the loss is another one, W&B gets a second row of the step.
    """

    def __init__(self, about: About, run_id: str) -> None:
        for name in ("wandb", ".wandb"):  # the second one is taken if it is there
            check_own(about.folder / name)
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._run = wandb.init(
            project=about.project,
            name=about.folder.name,
            id=run_id,
            resume="allow",
            dir=about.folder,
            config=_nested(about.settings),
            settings=wandb.Settings(console="off"),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        path = about.folder / "wandb.rows"
        self._earlier: set[str] = set()
        with suppress(FileNotFoundError):
            self._earlier = _later_rows(path, about.steps_done)
        self._rows = os.fdopen(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w", buffering=1)
        self._rows.writelines(f"{line}\n" for line in sorted(self._earlier, key=_step_of))

    def log(self, step: int, figures: dict[str, float]) -> None:
        """See Tool."""
        row = json.dumps([step, figures.get("loss"), figures.get("heldout_loss")])
        if row in self._earlier:
            return
        self._run.log({"step": step, **figures})
        self._rows.write(row + "\n")

    def alert(self, title: str, text: str) -> None:
        """See Tool."""
        self._run.alert(title, text, level="WARN")

    def finish(self, *, is_ok: bool) -> None:
        """See Tool."""
        self._run.finish(exit_code=0 if is_ok else 1)
        self._rows.close()


def _nested(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings by section, as W&B shows them."""
    nested: dict[str, Any] = {}
    for name, setting in settings.items():
        section, _, key = name.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[key] = setting
    return nested


def _later_rows(path: Path, steps_done: int) -> set[str]:
    """The rows of steps after `steps_done`. OSError if the file is none that a run has written."""
    found: set[str] = set()
    for block, _ in blocks_of_lines(path):
        found.update(line for line in block.decode(errors="replace").splitlines() if _step_of(line) > steps_done)
        if len(found) > _MOST_ROWS:
            raise OddFileError(
                errno.EFBIG, f"it has more than {_MOST_ROWS:,} rows after step {steps_done:,}", str(path)
            )
    return found


def _step_of(row: str) -> int:
    """The step of a line of wandb.rows; 0 if a kill has cut the line."""
    try:
        return int(json.loads(row)[0])
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return 0
