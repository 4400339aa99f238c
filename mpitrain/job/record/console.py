"""What a run shows on the console of rank 0: lines of steps and events, and a bar below them on a terminal."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from collectives import is_live_terminal
from collectives.texts import shown, without_secrets
from mpitrain.job.record.pace import Pace
from mpitrain.job.record.parsing.numbers import duration
from mpitrain.job.record.parsing.words import event_in_words

if TYPE_CHECKING:
    from mpitrain.job.record.files.metrics import StepMetrics

_DRAW_EVERY_S = 0.25
_SHORTEST_BAR = 4
TOLD = frozenset({"save", "trace"})
"""Events that `Terminal.event` prints. The code that writes the others prints lines of its own; a skipped step has its own line."""


class Terminal:
    """The output of rank 0, the only rank with this object: lines, and on a terminal a bar below them."""

    def __init__(self, *, every: int, steps: int) -> None:
        """`every`: a line every so many steps. `steps`: of the whole run."""
        live = is_live_terminal()
        self.console = Console(force_terminal=live, highlight=False, soft_wrap=not live)
        self._every, self._steps = every, steps
        self._bar = _Bar(steps)
        # Drawn by the steps themselves: a thread that draws would take the interpreter from the training.
        self._live = Live(self._bar, console=self.console, auto_refresh=False) if live else None
        self._drawn_at = 0.0

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        self.console.print(shown(without_secrets(text), lines=True), markup=False)

    def event(self, event: Mapping[str, Any]) -> None:
        """Print a line of events.jsonl in words, if it is one of TOLD."""
        if event.get("event") in TOLD:
            step = event.get("step")
            self.say(f"step {step}  {event_in_words(event)}" if step is not None else event_in_words(event))

    def step(self, metrics: "StepMetrics") -> None:
        """Show a step: as a line every `every` steps, for the first and the last step, and if it was skipped; in the bar always."""
        now = time.monotonic()
        self._bar.show(metrics, now)
        if metrics.skipped or metrics.step % self._every == 0 or metrics.step in (1, self._steps):
            self.say(f"step {metrics.step}/{self._steps}  {describe(metrics)}")
        if self._live is None:
            return
        if not self._live.is_started:
            self._live.start()
        if now - self._drawn_at >= _DRAW_EVERY_S:
            self._drawn_at = now
            self._live.refresh()

    def close(self) -> None:
        """End the bar. The last one stays on the screen."""
        if self._live is not None and self._live.is_started:
            self._live.stop()


class _Bar:
    """The steps done, a bar, loss, speed and the time left, in one line of any width."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._pace = Pace()
        self._step, self._figures = 0, ["", ""]

    def show(self, metrics: "StepMetrics", now: float) -> None:
        self._step = metrics.step
        self._pace.add(metrics.step, now)
        self._figures = [f"loss {metrics.loss:.4f}", f"{_short(metrics.tokens_per_s)} tokens/s"]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        done = f"step {self._step}/{self._steps}"
        left_s = self._pace.left_s(self._steps)
        left = "" if left_s is None else f"{duration(left_s)} left"
        width = options.max_width
        words = [word for word in (*self._figures, left) if word]
        room = width - len(done) - sum(len(word) + 2 for word in words) - 2
        if room < _SHORTEST_BAR:
            yield Text("  ".join([done, *words]), no_wrap=True, overflow="ellipsis")
            return
        line = Table.grid(padding=(0, 2, 0, 0))
        line.add_row(done, ProgressBar(self._steps, self._step, width=room), *words)
        yield line


def _short(number: float) -> str:
    """A number in at most six characters."""
    size, unit = next(
        ((size, unit) for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if number >= 10 * size), (1.0, "")
    )
    return f"{number / size:,.{1 if unit and number < 100 * size else 0}f}{unit}"


def describe(metrics: "StepMetrics") -> str:
    """Loss, speed and costs of a step in one short line."""
    text = (
        f"loss {metrics.loss:.4f}  {metrics.tokens_per_s:,.0f} tokens/s  {metrics.step_s * 1e3:.0f} ms  "
        f"comm {metrics.comm_s / metrics.step_s:.0%}  {metrics.memory_bytes / 1e6:,.0f} MB a rank"
    )
    if metrics.skipped:
        scale = "" if metrics.loss_scale is None else f" at loss scale {metrics.loss_scale:g}"
        text += f"  skipped: gradient norm {metrics.grad_norm:g}{scale}"
    return text
