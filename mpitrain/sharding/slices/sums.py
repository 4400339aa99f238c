"""The sums of gradients over the slices of a step.

Each element of the gradient has one owner among the ranks with different data. In each round the owners read their elements of all
ranks' gradient buffers, in order of rank, which is the order of the slices, and add them to the tree (tree.py). After the last round
the owner divides by the number of slices, which is exact, and the copies of a shard exchange their elements. So no sum depends on the
number of ranks, and a rank keeps the sums of its own elements alone.

In stage 1 to 3 the owner has the shard; if there are several copies of it, each owns a part of it. In stage 0 each rank owns a part of
the whole. So the messages between the copies are those of one reduce-scatter a round and one all-gather a step.
"""

from itertools import pairwise

import torch

from collectives import Work
from mpitrain.sharding.slices.rounds import Slices
from mpitrain.sharding.slices.tree import TreeSum
from mpitrain.sharding.unit.ranks import DataParallelRanks


class SliceSums:
    """The sums of one gradient buffer. Making it is collective.

    Args:
        slices: of the model.
        ranks: that reduce the buffer.
        bounds: the elements at which the shards begin and end, as real numbers.
        dtype: of the buffer, real.
    """

    def __init__(
        self, slices: Slices, ranks: DataParallelRanks, bounds: list[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._slices, self._ranks = slices, ranks
        self.dtype = torch.promote_types(dtype, torch.float32)
        num_copies = ranks.replicate.size
        shards = list(pairwise(bounds))
        # Of each shard the parts of its copies.
        cuts = [[begin + (end - begin) * n // num_copies for n in range(num_copies + 1)] for begin, end in shards]
        places = ranks.data_parallel.all_gather_object((ranks.shard.rank, ranks.replicate.rank))
        self._bounds = [(cuts[shard][copy], cuts[shard][copy + 1]) for shard, copy in places]
        mine = cuts[ranks.shard.rank]
        self._counts = [end - begin for begin, end in pairwise(mine)]
        begin, end = self._bounds[ranks.data_parallel.rank]
        self._tree = TreeSum(end - begin, self.dtype, device)
        self.num_done = 0
        """Rounds of the step so far."""

    def begin(self, buffer: torch.Tensor) -> Work:
        """Add a round, of which this rank's gradients are in `buffer`, 1-D and real. Collective."""
        num_leaves = self._slices.num_leaves(self.num_done)
        self.num_done += 1
        return self._ranks.data_parallel.reduce_by(
            buffer, lambda parts: self._tree.add(parts[:num_leaves]), bounds=self._bounds
        )

    @property
    def num_rounds(self) -> int:
        """Rounds of a whole step."""
        return self._slices.num_rounds

    @property
    def is_complete(self) -> bool:
        """Whether the last round has begun."""
        return self.num_done == self.num_rounds

    def take(self) -> torch.Tensor:
        """The mean over the slices of this rank's shard, after the last round; the next one begins a step. Collective."""
        mine, self.num_done = self._tree.take(1.0 / self._slices.count), 0
        replicate = self._ranks.replicate
        if replicate.size == 1:
            return mine
        whole = torch.empty(sum(self._counts), dtype=mine.dtype, device=mine.device)
        replicate.all_gather(whole, mine, counts=self._counts)
        return whole

    def forget(self) -> None:
        """Drop the rounds of a step that was given up."""
        self._tree.forget()
        self.num_done = 0
