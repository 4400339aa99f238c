"""What a rank tells of a fault: a line to the user, and an event of the run's folder. Rank 0 alone writes."""

from collections.abc import Callable
from typing import Any

from mpitrain.job.record.files.events import NAME


class Reports:
    """The lines and events of one rank. `write`: see `TrainingRun.write_event`. `say`: prints a line."""

    def __init__(self, write: Callable[..., object], rank: int, say: Callable[[str], object]) -> None:
        self._write, self._is_writer, self._say = write, rank == 0, say

    def tell(self, line: str, event: str, **fields: Any) -> None:
        """Print a line, and append an event; on all ranks, with the same arguments. The fields: see `events.write_event`."""
        if not self._is_writer:
            return
        if line:
            self._say(line)
        try:
            self._write(event, **fields)
        except OSError as error:  # a full disk ends a run at its next save, on all ranks
            self._say(f"{NAME} cannot be written: {error.strerror or error}")
