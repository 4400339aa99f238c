"""The stream of activations between two stages of a pipeline: what `tensor_parallel` and `pipeline` tell each other by marks.

With sequence parallelism each rank has its own tokens of the stream between two blocks. So it passes these alone on to the rank of the
next stage that has the same tokens. In a forward without gradients all tokens pass, whose number may be any.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from collectives import Communicator
from mpitrain.placement.parts import bounds


class SplitStream(NamedTuple):
    """How the stream passes before and after a block if the block before it, or after it, is in another stage."""

    over: Communicator
    """The ranks that each have their own tokens."""
    arrive: Callable[[torch.Tensor], torch.Tensor]
    """(..., all tokens, C) -> the stream for the first block of a stage that is called; see `at_place`."""
    pass_on: Callable[[torch.Tensor], torch.Tensor]
    """The stream behind the last block of a stage that is called -> that which the next stage gets."""

    def at_place(self, x: torch.Tensor) -> torch.Tensor:
        """(..., this rank's tokens, C) -> (..., all tokens, C), with zeros for the tokens of other ranks.

        A model's code before its blocks sees the number of all tokens, as for positions.
        """
        size, rank = self.over.size, self.over.rank
        edges = bounds(x.shape[-2] * size, size)
        return F.pad(x, (0, 0, edges[rank], edges[-1] - edges[rank + 1]))


def mark_split(block: Any, split: SplitStream) -> None:
    """The stream before and after `block` is split, unless the block is the first or the last one."""
    block.split_stream = split


def split_of(block: Any) -> SplitStream | None:
    """How the stream before and after a block is split; None if it is not."""
    return getattr(block, "split_stream", None)


def mark_stages(model: Any, stream: str) -> None:
    """`model` has this rank's stages of a pipeline alone. Its forward takes the output of an earlier stage as the argument `stream`."""
    model.stream_of_stages = stream


def stream_of_stages(model: Any) -> str | None:
    """The argument by which a model takes the output of an earlier stage; None for a model that is not divided into stages."""
    return getattr(model, "stream_of_stages", None)
