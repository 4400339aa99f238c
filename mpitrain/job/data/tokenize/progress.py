"""How far a job is: a live bar on a terminal, lines elsewhere."""

import time

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from collectives import is_live_terminal

_LINE_EVERY_S = 10.0


class ShownProgress:
    """The progress of a job on rank 0, in bytes of `total`. `begin`: what earlier jobs have done."""

    def __init__(self, doing: str, total: int, begin: int = 0) -> None:
        live = is_live_terminal()
        self._console = Console(force_terminal=live, highlight=False, soft_wrap=not live)
        self._doing, self._total, self._begin = doing, total, begin
        self._started = self._last = time.monotonic()
        self._bar: Progress | None = None
        if live:
            columns = (BarColumn(bar_width=None), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._bar = Progress(TextColumn(doing), *columns, console=self._console)
            self._task = self._bar.add_task(doing, total=total, completed=begin)
            self._bar.start()

    def update(self, done: int) -> None:
        """Show that so many bytes are done."""
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=done)
        elif now - self._last >= _LINE_EVERY_S:
            self._last = now
            speed = (done - self._begin) / (now - self._started)
            self.say(f"{self._doing}: {done / 1e6:,.1f} of {self._total / 1e6:,.1f} MB, {speed / 1e6:,.1f} MB/s")

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        self._console.print(text, markup=False)

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.stop()
