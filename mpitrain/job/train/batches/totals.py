"""A sum of losses of a global batch, from numbers that a message adds up over all ranks."""

from collections.abc import Sequence
from functools import reduce
from operator import add

import torch

from mpitrain.job.train.batches.micro_batch import MicroBatch
from mpitrain.sharding.slices.rounds import Slices
from mpitrain.sharding.slices.tree import tree_sum


class LossTotal:
    """With slices each slice has a number of its own in the message, to which the other ranks add zeros. So the message is exact, and
    then the numbers are added up in the order of the tree.

    `num_same`: the ranks that have the same rows, each of which computes their losses.
    """

    def __init__(self, slices: Slices | None, num_same: int) -> None:
        self._slices, self._num_same = slices, num_same

    @property
    def num_values(self) -> int:
        """The numbers of a global batch in the message."""
        return 1 if self._slices is None else self._slices.count

    def values(self, batches: Sequence[MicroBatch], losses: Sequence[float] | torch.Tensor) -> list[float]:
        """This rank's numbers. `losses`: of each micro-batch, of one or several global batches, the sum over its targets."""
        if self._slices is None:
            return [float(reduce(add, losses))]
        # The loss of a slice that is repeated is 0: none of its targets counts.
        numbers = [batch.slice for batch in batches if batch.slice is not None]
        return self._slices.at_places(zip(numbers, map(float, losses), strict=True))

    def total(self, sums: Sequence[float]) -> float:
        """The total; each target counts as often as ranks have it."""
        if self._slices is None:
            return sums[0]
        return tree_sum([value / self._num_same for value in sums]) * self._num_same
