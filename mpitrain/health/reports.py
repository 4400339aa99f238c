"""What a rank tells of a fault: a line to the user, and an event of the run's folder. Rank 0 alone writes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpitrain.elastic.events import NAME, write_event


class Reports:
    """The lines and events of one rank. `folder`: the run's folder; None: lines alone. `say`: prints a line."""

    def __init__(self, folder: Path | None, rank: int, say: Callable[[str], object]) -> None:
        self._folder, self._is_writer, self._say = folder, rank == 0, say

    def tell(self, line: str, event: str, **fields: Any) -> None:
        """Print a line, and append an event; every rank calls it with the same arguments. The fields are those of `write_event`."""
        if not self._is_writer:
            return
        if line:
            self._say(line)
        if self._folder is None:
            return
        try:
            write_event(self._folder, event, **fields)
        except OSError as error:  # a full disk ends a run at its next save, on all ranks
            self._say(f"{self._folder / NAME} cannot be written: {error.strerror or error}")
