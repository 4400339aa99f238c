"""Which rows of a global batch are which micro-batch of which rank: pure arithmetic."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from collectives import Communicator
from mpitrain.sharding.slices import Slices


class BatchPart(NamedTuple):
    """Rows `begin` to `end` of a global batch: a micro-batch. `slice`: its number, or None. `counts`: see `Round`."""

    begin: int
    end: int
    slice: int | None = None
    counts: bool = True


def parts_of(batch: int, data: Communicator, slices: Slices | None, *, num_micro: int) -> list[BatchPart]:
    """The micro-batches of this rank of `data`, of a global batch of `batch` rows: `num_micro`, or one for each round of slices.

    Without slices the ranks have equal numbers of rows, or one more or less.
    """
    if slices is not None:
        return [BatchPart(*slices.rows(number, batch), number, counts) for number, counts in slices.rounds]
    begin, end = batch * data.rank // data.size, batch * (data.rank + 1) // data.size
    cuts = [begin + (end - begin) * n // num_micro for n in range(num_micro + 1)]
    return [BatchPart(first, last) for first, last in pairwise(cuts)]


def rows_of(parts: Sequence[BatchPart]) -> list[int]:
    """The numbers of the rows, without those that a round repeats."""
    return [row for part in parts if part.counts for row in range(part.begin, part.end)]
