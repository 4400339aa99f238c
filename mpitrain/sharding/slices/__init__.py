"""Slices of a global batch, whose sums have the same bits at any number of ranks.

- `tree.py`: the tree of additions over the slices.
- `rounds.py`: which rank trains which slice, and when.
- `sums.py`: the gradients of a step, from the gradient buffers of all ranks to the shards.
- `buffers.py`: running statistics, and other buffers that a forward changes.
- `draws.py`: random numbers, also in the stages of a pipeline.
- `api.py`: what a training loop calls.

Floating-point addition is not associative. So a sum has the same bits at any number of ranks only if the same numbers are added in the
same pairs. A slice is the smallest part of a batch that a rank trains, and the pairs are those of one binary tree over the slices.
"""

from mpitrain.sharding.slices.rounds import Round, Slices

__all__ = ["Round", "Slices"]
