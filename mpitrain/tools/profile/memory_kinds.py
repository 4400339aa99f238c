"""The memory of a rank by layer and kind, as plain data."""

from typing import NamedTuple

KINDS = {
    "parameters": "this rank's shards",
    "gradients": "of the shards",
    "optimizer": "its moments of the shards",
    "activations": "tensors that autograd has saved for the backward",
}
"""The kinds of memory of a layer."""
OTHERS = {
    "full parameters": "those of forward and backward, without shards that are rows of them; the ranks of a node may share them",
    "process": "Python, torch and MPI, before the model was made",
    "other": "buffers of reductions, what kernels need while they run, data, and free memory that the allocator keeps",
}
"""What else a rank holds at the peak."""


class HeldMemory(NamedTuple):
    """Bytes on one rank in a step."""

    layers: dict[str, dict[str, int]]
    """By layer and kind. Activations: when their sum was largest."""
    others: dict[str, int]
    """See OTHERS."""
    peak: int
    """Of the process, or of the GPU."""
    moment: str
    """In which layer, forward or backward, the memory was largest."""
