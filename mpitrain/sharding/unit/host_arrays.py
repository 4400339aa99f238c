"""The arrays of gradients in host memory: in memory that the ranks of a node share, as long as it has room."""

from collections import deque
from collections.abc import Sequence

import torch

from collectives import Communicator
from collectives.transports.node.memory import say_short

_NUM_BUFFERS = 2  # they take turns: see [Note: gradient buffers] in step/reducer.py


def gradient_buffers(numels: Sequence[int]) -> tuple[int, int]:
    """The number of buffers for gradients that are reduced one after another, and the elements of each. `numels`: of the gradients."""
    return min(len(numels), _NUM_BUFFERS), max(numels, default=0)


def host_arrays(peers: Communicator, dtype: torch.dtype, numel: int, count: int) -> deque[torch.Tensor]:
    """`count` arrays of zeros, which the other ranks of the node can read. Collective over `peers`.

    If a node has no room, all ranks get private arrays, whose reductions have the same bits and take longer.
    """
    arrays: deque[torch.Tensor] = deque()
    problem = ""
    try:
        arrays.extend(peers.node.empty(numel, dtype) for _ in range(count))
    except OSError as error:  # on all ranks of the node
        problem = str(error)
    # The ranks choose the algorithm of a reduction by the memory, so it is of one kind on all nodes.
    problems = [each for each in peers.all_gather_object(problem) if each] if peers.num_nodes > 1 else [problem]
    if not any(problems):
        return arrays
    say_short(peers.rank, f"gradients are reduced from private memory: {problems[0]}")
    return deque(torch.zeros(numel, dtype=dtype) for _ in range(count))
