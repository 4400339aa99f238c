"""The tree of additions over L slices, L a power of two.

Node i of level 0 is slice i. Node i of level n is the sum of the nodes 2 i and 2 i + 1 of level n - 1, in this order. The one node of
the last level is the sum over all slices.

Leaves come in the order of the slices, as bits come to a binary counter: a node is added to its left neighbour as soon as both are
there. So at most one node of each level waits.
"""

from collections.abc import Sequence

import torch

_BLOCK = 1 << 16  # elements that are added at a time: their nodes of all levels stay in a core's cache


def tree_sum(values: Sequence[float]) -> float:
    """The sum of one number for each slice, in the order of the tree. The number of values is a power of two."""
    level = list(values)
    while len(level) > 1:
        level = [left + right for left, right in zip(level[::2], level[1::2], strict=True)]
    return level[0]


class TreeSum:
    """The sums of 1-D tensors of `numel` elements over the slices. `dtype`: of the sums, at least fp32."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._numel, self._dtype, self._device = numel, dtype, device
        self._nodes: list[tuple[int, torch.Tensor]] = []  # level and sum of the nodes that wait, the lowest level last

    def add(self, leaves: Sequence[torch.Tensor]) -> None:
        """Add the tensors of the next slices, in order. They are only read, and may have a shorter dtype."""
        levels, kept = self._after(len(leaves))
        nodes = [(level, torch.empty(self._numel, dtype=self._dtype, device=self._device) if old is None else old)
                 for level, old in zip(levels, kept, strict=True)]  # fmt: skip
        step = _BLOCK if self._device.type == "cpu" else max(self._numel, 1)
        for begin in range(0, self._numel, step):
            block = slice(begin, begin + step)
            waiting = [(level, node[block], True) for level, node in self._nodes]
            for leaf in leaves:
                _push(waiting, leaf[block].to(self._dtype))
            for (_, value, is_kept), (_, node) in zip(waiting, nodes, strict=True):
                if not is_kept:
                    node[block].copy_(value)
        self._nodes = nodes

    def _after(self, num_leaves: int) -> tuple[list[int], list[torch.Tensor | None]]:
        """The levels of the nodes that wait after so many more leaves, and the memory of those that grow out of nodes of now."""
        stack: list[tuple[int, torch.Tensor | None]] = list(self._nodes)
        for _ in range(num_leaves):
            level, memory = 0, None
            while stack and stack[-1][0] == level:
                level, memory = level + 1, stack.pop()[1]
            stack.append((level, memory))
        return [level for level, _ in stack], [memory for _, memory in stack]

    def take(self, factor: float) -> torch.Tensor:
        """The sum over all slices, multiplied by `factor`, after the last one. The next leaf is slice 0 again."""
        [(_, total)] = self._nodes
        self._nodes = []
        return total.mul_(factor)

    def forget(self) -> None:
        """Begin again with slice 0."""
        self._nodes = []


def _push(waiting: list[tuple[int, torch.Tensor, bool]], leaf: torch.Tensor) -> None:
    """Add a leaf to the nodes that wait: (level, sum, whether the sum is in memory that stays)."""
    level, value, is_own, is_kept = 0, leaf, False, False
    while waiting and waiting[-1][0] == level:
        _, left, is_kept = waiting.pop()
        # Addition is commutative, bit for bit, so either operand may take the sum.
        if is_kept:
            value = left.add_(value)
        else:
            value = value.add_(left) if is_own else torch.add(left, value)
        level, is_own = level + 1, True
    waiting.append((level, value, is_kept))
