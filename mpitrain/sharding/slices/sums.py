"""The sums of gradients over the slices of a step.

Each element of the gradient has one owner among the ranks with different data. In each round the owners read their elements of all
ranks' gradient buffers, in order of rank, which is the order of the slices, and add them to the tree (tree.py). After the last round
the owner divides by the number of slices, which is exact, and the copies of a shard exchange their elements. So no sum depends on the
number of ranks, and a rank keeps the sums of its own elements alone.

In stage 1 to 3 the owner has the shard; if there are several copies of it, each owns a part of it. In stage 0 each rank owns a part of
the whole. So the messages between the copies are those of one reduce-scatter a round and one all-gather a step.

On several nodes the ranks of a node first add their slices as far as these are complete subtrees, and send the sums to the owner. They
are nodes of the same tree, so the bits stay. If the number of ranks on a node is a power of two, a node sends one sum.
"""

from itertools import groupby, pairwise

import torch

from collectives import Communicator, Runs, Work
from mpitrain.sharding.ranks import DataParallelRanks
from mpitrain.sharding.slices.rounds import Slices
from mpitrain.sharding.slices.tree import TreeSum, add_subtree


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
        self._neighbours = _neighbours(ranks.data_parallel)
        self.num_done = 0
        """Rounds of the step so far."""

    def begin(self, buffer: torch.Tensor) -> Work:
        """Add a round, of which this rank's gradients are in `buffer`, 1-D and real. Collective."""
        subtrees = self._slices.subtrees(self.num_done, self._neighbours)
        levels = [(end - begin).bit_length() - 1 for begin, end in subtrees]
        self.num_done += 1
        return self._ranks.data_parallel.reduce_by(
            buffer,
            lambda sums: self._tree.add(sums, levels),
            bounds=self._bounds,
            runs=Runs(subtrees, add_subtree, self.dtype),
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

    def reset(self) -> None:
        """Begin the step again."""
        self._tree.reset()
        self.num_done = 0


def _neighbours(comm: Communicator) -> list[tuple[int, int]]:
    """The ranks, from the first one to the one after the last, that may add their slices before an owner does.

    On several nodes these are consecutive ranks of one node. On one node each rank is by itself, because an owner adds fastest what
    it reads in place.
    """
    node_of = {rank: node if comm.num_nodes > 1 else rank for node, ranks in enumerate(comm.nodes) for rank in ranks}
    groups = [list(ranks) for _, ranks in groupby(range(comm.size), node_of.__getitem__)]
    return [(ranks[0], ranks[-1] + 1) for ranks in groups]
