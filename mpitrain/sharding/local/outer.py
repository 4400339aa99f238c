"""The outer parameters of one flat buffer, and the mean of the copies' changes of them."""

import torch
import xxhash

from mpitrain.sharding.ranks import DataParallelRanks
from mpitrain.sharding.unit.gradients import numbers
from mpitrain.sharding.unit.parameter import ShardedParameter


class OuterParameters:
    """The outer values of the shards of `params`, which have one dtype, and the momentum of the outer optimizer, if it has one.

    Both are laid out as the shards are, and have the same bits on all copies.
    """

    def __init__(self, params: list[ShardedParameter], ranks: DataParallelRanks, *, has_momentum: bool) -> None:
        self._params, self._ranks, self._across = params, ranks, ranks.wired.across
        self.values = self._inner()
        self.momentum = torch.zeros_like(self.values) if has_momentum else None
        self.name = params[0].name
        """The name of the first parameter, for messages."""

    def of_params(self, flat: torch.Tensor) -> list[tuple[ShardedParameter, torch.Tensor]]:
        """For each parameter its part of `values` or of `momentum`, a view with the shape of the shard."""
        parts = flat.split([param.box.numel for param in self._params])
        return [(param, part.view(param.box.shape)) for param, part in zip(self._params, parts, strict=True)]

    def _inner(self) -> torch.Tensor:
        return torch.cat([param.shard.detach().reshape(-1) for param in self._params])

    def digest(self) -> str:
        """A hash of all values, to compare the copies."""
        return xxhash.xxh3_64_hexdigest(self.values.cpu().view(torch.uint8).numpy().data)

    def reset(self) -> None:
        """Take the values of the shards, and no momentum."""
        self.values.copy_(self._inner())
        if self.momentum is not None:
            self.momentum.zero_()

    def show(self) -> None:
        """Give the shards the outer values."""
        for param, part in self.of_params(self.values):
            param.shard.copy_(part)

    def step(self, lr: float, momentum: float) -> None:
        """Step along the mean of the copies' changes, and give all copies the result. Collective.

        A copy sends the difference to the outer parameters, and not its parameters: a difference loses less in a short format.
        """
        inner = self._inner()
        gradient = torch.sub(self.values, inner, out=inner)
        self._average(numbers(gradient))
        if self.momentum is not None:  # torch.optim.SGD(nesterov=True), operation by operation
            self.momentum.mul_(momentum).add_(gradient)
            gradient.add_(self.momentum, alpha=momentum)
        self.values.add_(gradient, alpha=-lr)
        self.show()

    def _average(self, elements: torch.Tensor) -> None:
        """The mean over the copies, in place. Collective.

        Where the ranks of a copy have the same elements (stage 0), each of them averages a part, so a copy sends its elements once.
        """
        size, rank = 1, 0
        within = self._ranks.within
        if self._ranks.shard.size < within.size:
            size, rank = within.size, within.rank
        bounds = [elements.numel() * number // size for number in range(size + 1)]
        mine = elements[bounds[rank] : bounds[rank + 1]]
        if mine.numel() and self._across.size > 1:
            self._across.all_reduce(mine, "avg")
        if size > 1:
            within.all_gather(elements, mine, counts=[bounds[i + 1] - bounds[i] for i in range(size)])
