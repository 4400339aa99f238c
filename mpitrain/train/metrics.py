"""The output of a run: one JSON object per step in `metrics.jsonl`, and lines or a live bar on the terminal."""

import json
import math
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from collectives import is_live_terminal


class StepMetrics(NamedTuple):
    """One step as rank 0 measured it. `metrics.jsonl` has these names."""

    step: int
    loss: float  # nats per token, mean over the global batch
    lr: float
    grad_norm: float
    tokens_per_s: float  # all ranks
    step_s: float
    comm_s: float  # in communication, including the wait for other ranks
    data_s: float
    memory_bytes: int  # this rank's resident set with shared pages; on a GPU torch's peak
    mfu: float  # share of the FLOP/s that a large matrix product reached on the same ranks at the start
    loss_scale: float | None = None  # factor of the loss; None without scaling: see `GradScaler`
    check_s: float | None = None  # in the checks of this step, including waits for other ranks
    padding: float | None = None  # share of the tokens that only fill rows up; None unless documents stay whole
    skipped: bool = False  # the optimizer did not step, because loss or gradients are not finite

    def to_dict(self) -> dict[str, Any]:
        """The fields for `MetricsFile.write`, without fields that do not apply."""
        return {name: value for name, value in self._asdict().items() if value is not None and value is not False}


def memory_bytes(device: torch.device) -> int:
    """The memory that this rank has now; on a GPU torch's peak."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class MetricsFile:
    """`metrics.jsonl` of a run: lines of steps and of evaluations, in order of step."""

    def __init__(self, path: Path, *, steps_done: int) -> None:
        """Open the file to continue after `steps_done` steps: lines of later steps, from before a crash, are cut off."""
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._unwritten = b""
        self._failure: OSError | None = None
        kept = sum(len(line) for line, _ in _lines(path, steps_done))
        self.num_cut = len({entry["step"] for _, entry in _lines(path, math.inf)} - set(range(steps_done + 1)))
        """The number of steps whose lines are cut off."""
        # In place: if a kill interrupted the rewriting of the whole file, its lines would be lost.
        self._file.truncate(kept)

    def write(self, entry: Mapping[str, float]) -> None:
        """Add a line, with null for values that are not finite; readers see it at once. A line that cannot be written (full disk) is
        written with the next one; see `check`."""
        finite = {name: value if math.isfinite(value) else None for name, value in entry.items()}
        self._unwritten += json.dumps(finite).encode() + b"\n"
        self._failure = None
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            # Not raised here: only rank 0 would notice the error, and the steps since the last checkpoint would be lost.
            self._failure = error

    def check(self) -> None:
        """Raise OSError if lines could not be written."""
        if self._failure is not None:
            raise OSError(f"{self._path} cannot be written: {self._failure.strerror or self._failure}")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def is_evaluated(path: Path, step: int) -> bool:
    """Whether the `metrics.jsonl` at `path` has the evaluation after `step` steps."""
    return any(entry["step"] == step and "heldout_loss" in entry for _, entry in _lines(path, step))


def _lines(path: Path, steps: float) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The lines of the first `steps` steps, raw and parsed. An incomplete last line, left by a killed process, is ignored."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                entry = json.loads(line)
                if not line.endswith(b"\n") or entry["step"] > steps:
                    return
            except (ValueError, TypeError, KeyError):
                return
            yield line, entry


class Terminal:
    """The output of rank 0, the only rank with this object: a live bar on a terminal, plain lines elsewhere."""

    def __init__(self, *, every: int, steps: int) -> None:
        live = is_live_terminal()
        self.console = Console(force_terminal=live, highlight=False, soft_wrap=not live)
        self._every, self._steps = every, steps
        self._progress: Progress | None = None
        if live:
            self._progress = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(bar_width=None),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=self.console,
                refresh_per_second=4,
            )
            self._task = self._progress.add_task("", total=steps)

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        self.console.print(text, markup=False)

    def step(self, metrics: StepMetrics) -> None:
        """Show a step: always in the bar; as a line every `every` steps and for each skipped step."""
        text = describe(metrics)
        if self._progress is not None:
            if not self._progress.live.is_started:
                self._progress.start()
            self._progress.update(self._task, completed=metrics.step, description=text)
            if metrics.skipped:
                self.say(f"step {metrics.step}/{self._steps}  {text}")
        elif metrics.skipped or metrics.step % self._every == 0 or metrics.step in (1, self._steps):
            self.say(f"step {metrics.step}/{self._steps}  {text}")

    def close(self) -> None:
        """End the bar."""
        if self._progress is not None and self._progress.live.is_started:
            self._progress.stop()


def describe(metrics: StepMetrics) -> str:
    """Loss, speed and costs of a step in one short line."""
    text = (
        f"loss {metrics.loss:.4f}  {metrics.tokens_per_s:,.0f} tokens/s  {metrics.step_s * 1e3:.0f} ms  "
        f"comm {metrics.comm_s / metrics.step_s:.0%}  {metrics.memory_bytes / 1e6:,.0f} MB a rank"
    )
    if metrics.skipped:
        scale = "" if metrics.loss_scale is None else f" at loss scale {metrics.loss_scale:g}"
        text += f"  skipped: gradient norm {metrics.grad_norm:g}{scale}"
    return text
