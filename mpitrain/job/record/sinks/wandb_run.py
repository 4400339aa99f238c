"""A run in Weights & Biases. It is called by program.py alone."""

import os
from typing import Any

from mpitrain.files import check_own
from mpitrain.job.record.sinks.sink import About
from mpitrain.job.record.sinks.wandb_rows import WandbRows


class WandbRun:
    """The run in the project `About.project`. Its files are in RUN/wandb. W&B's own variables apply, such as WANDB_MODE=offline.

    W&B numbers rows, and cannot take rows back. A step that is computed again after a crash has the same bits, so its row is left out:
    `RUN/wandb.rows` has the losses and the numbers of the rows that W&B has. If the loss is another one, W&B gets a second row of the
    step. Offline W&B knows nothing of an earlier start, and would begin at 0 again; its server takes no row with an earlier number.
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
        self._rows = WandbRows(about.folder / "wandb.rows", about.steps_done)
        self._rows.next_number = max(
            self._rows.next_number, self._run.starting_step
        )  # which its server tells, if it is online

    def log(self, step: int, figures: dict[str, float]) -> None:
        """See Tool."""
        if self._rows.has(step, figures):
            return
        self._run.log({"step": step, **figures}, step=self._rows.next_number, commit=True)
        self._rows.add(step, figures)

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
