"""Records the calls of a communicator in its Log, and compares them between its ranks in checked mode."""

from typing import Any

from collectives.diagnosis.checked import compare_calls
from collectives.diagnosis.record import Entry, Log


class Recorder:
    """Records the calls of the communicator `mpi`. `checked`: whether its ranks compare their calls."""

    def __init__(self, mpi: Any, log: Log, *, checked: bool) -> None:
        self._mpi, self.log, self.checked = mpi, log, checked

    def enter(
        self,
        operation: str,
        call: str = "",
        root: int | None = None,
        op: str | None = None,
        elements: int = 0,
        dtype: str = "",
    ) -> Entry:
        """Note in the flight record that this rank enters a collective. In checked mode compare its description `call` on all ranks."""
        entry = self.log.enter(operation, elements, dtype, op, root)
        if self.checked:
            with entry.failing():
                compare_calls(self._mpi, call or entry.operation.words, entry)
        return entry
