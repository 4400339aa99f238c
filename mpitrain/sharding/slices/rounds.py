"""Which rank trains which slice of a global batch, and when.

The slices are dealt to the ranks in turn, so that those of one round are neighbours in the tree, and few sums wait for others.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mpitrain.sharding.ranks import DataParallelRanks
from mpitrain.sharding.slices.tree import subtrees


class Round(NamedTuple):
    """A forward and backward of one rank. `number`: of its slice. `counts`: whether its gradient and its loss count.

    If the ranks do not divide the slices, some ranks have no slice in the last round. They run an earlier one again, because forwards
    and backwards are collective; what they compute is left out.
    """

    number: int
    counts: bool


@dataclass(frozen=True)
class Slices:
    """The slices of a step, `count` (a power of two), over `num_ranks` ranks with different data, of which this is `rank`."""

    count: int
    num_ranks: int
    rank: int

    @classmethod
    def of(cls, count: int, ranks: DataParallelRanks) -> "Slices":
        """Those of a model."""
        return cls(count, ranks.data_parallel.size, ranks.data_parallel.rank)

    @property
    def num_rounds(self) -> int:
        """The forwards and backwards of each rank in a step."""
        return -(-self.count // self.num_ranks)

    @property
    def rounds(self) -> list[Round]:
        """This rank's rounds of a step."""
        numbers = range(self.rank, self.num_rounds * self.num_ranks, self.num_ranks)
        return [Round(number, True) if number < self.count else Round(self.rank, False) for number in numbers]

    def rows(self, number: int, batch: int) -> tuple[int, int]:
        """The first row of slice `number` in a global batch of `batch` rows, a multiple of the slices, and the row after its last."""
        length = batch // self.count
        return number * length, (number + 1) * length

    def at_places(self, values: Iterable[tuple[int, float]]) -> list[float]:
        """A number for each slice, for a message that all ranks add up: the sum of this rank's `values` of it (number of the slice,
        value), or 0. A slice is of one rank, so the message is exact."""
        places = [0.0] * self.count
        for number, value in values:
            places[number] += value
        return places

    @property
    def num_waiting(self) -> int:
        """The most sums that a rank keeps between two rounds: a round adds slices to a binary counter, see tree.py."""
        return max(((number * self.num_ranks).bit_count() for number in range(1, self.num_rounds)), default=0)

    def num_leaves(self, number: int) -> int:
        """How many ranks have a slice in round `number`: the first ones."""
        return min(self.num_ranks, self.count - number * self.num_ranks)

    def subtrees(self, number: int, neighbours: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """The ranks, from the first one to the one after the last, whose slices in round `number` are complete subtrees, in order.

        `neighbours`: the ranks within which subtrees may be, in order, all ranks in all.
        """
        first, end_of_round = number * self.num_ranks, self.num_leaves(number)
        return [
            (begin - first, end - first)
            for low, high in neighbours
            for begin, end in subtrees(first + low, first + min(high, end_of_round))
        ]
