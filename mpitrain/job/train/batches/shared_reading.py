"""Reading for several ranks with the same rows: the first one reads, and sends the rows to the others."""

from collections.abc import Callable

import numpy as np

from collectives import Communicator
from mpitrain.job.data.streaming.stream import TokenRows
from mpitrain.job.train.batches.micro_batch import MicroBatch


class SharedReading:
    """The rows of the ranks `same`, which have the same ones; None if each rank reads by itself.

    `length`: of a row, in tokens. `is_whole`: see `TokenRows`.
    """

    def __init__(self, same: Communicator | None, *, length: int, is_whole: bool) -> None:
        self._same, self._length, self._is_whole = same, length, is_whole

    @property
    def leads(self) -> bool:
        """Whether this rank reads."""
        return self._same is None or self._same.rank == 0

    def read(
        self,
        read: Callable[[], "np.ndarray | TokenRows"],
        parts: Callable[["np.ndarray | TokenRows"], list[MicroBatch]],
        num_rows: int,
    ) -> tuple[list[MicroBatch], Exception | None]:
        """What `parts` makes of the rows that `read` reads on the first rank; and an error.

        Collective over these ranks. After an error of the first one the others have none, and no micro-batches.
        """
        rows, error = None, None
        try:
            rows = read() if self.leads else None
        except Exception as failed:
            error = failed
        if self._same is not None:
            rows = self._from_first(self._same, rows, num_rows)
        try:
            return ([], error) if rows is None else (parts(rows), None)
        except Exception as failed:
            return [], failed

    def _from_first(self, same: Communicator, rows: "np.ndarray | TokenRows | None", num_rows: int) -> TokenRows | None:
        """The rows of the first rank; None if it has none."""
        there = np.zeros((2, num_rows, self._length), np.int32)
        num_read = np.array([0 if rows is None else 1], np.int64)
        same.broadcast(num_read)
        if not num_read[0]:
            return None
        if isinstance(rows, TokenRows):
            there[0], there[1] = rows.tokens, rows.segments
        same.broadcast(there)
        return TokenRows(there[0], there[1], self._is_whole)
