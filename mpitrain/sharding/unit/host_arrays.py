"""The arrays of gradients in host memory, which the other ranks of the node can read."""

import logging
from collections.abc import Sequence

import torch

from collectives import Communicator
from collectives.transports.node.memory import say_short

_NUM_BUFFERS = 2  # they take turns: see [Note: gradient buffers] in step/reducer.py
_log = logging.getLogger("mpitrain")


def gradient_buffers(numels: Sequence[int]) -> tuple[int, int]:
    """The number of buffers for gradients that are reduced one after another, and the elements of each. `numels`: of the gradients."""
    return min(len(numels), _NUM_BUFFERS), max(numels, default=0)


def host_arrays(peers: Communicator, dtype: torch.dtype, numel: int, count: int) -> list[torch.Tensor]:
    """`count` arrays of zeros, which the other ranks of the node can read. Collective over `peers`.

    Where a node has no memory that its ranks can share, they are private there.
    """
    try:
        return [peers.node.empty(numel, dtype, or_anonymous=True) for _ in range(count)]
    except OSError as error:  # on all ranks of the node
        say_short(peers.node.rank, "gradients are reduced from private memory", error, _log)
        return [torch.zeros(numel, dtype=dtype) for _ in range(count)]
