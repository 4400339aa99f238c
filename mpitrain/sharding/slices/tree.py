"""The tree of additions over L slices, L a power of two.

Node i of level 0 is slice i. Node i of level n is the sum of the nodes 2 i and 2 i + 1 of level n - 1, in this order. The one node of
the last level is the sum over all slices.

Leaves come in the order of the slices, as bits come to a binary counter: a node is added to its left neighbour as soon as both are
there. So at most one node of each level waits.
"""

from collections.abc import Iterator, Sequence

import torch

_BLOCK = 1 << 16  # elements that are added at a time: their nodes of all levels stay in a core's cache


def tree_sum(values: Sequence[float]) -> float:
    """The sum of one number for each slice, in the order of the tree. The number of values is a power of two."""
    level = list(values)
    while len(level) > 1:
        level = [left + right for left, right in zip(level[::2], level[1::2], strict=True)]
    return level[0]


def subtrees(begin: int, end: int) -> list[tuple[int, int]]:
    """Slices `begin` to `end` as the fewest complete subtrees: the first slice of each, and the one after its last."""
    found = []
    while begin < end:
        size = min(begin & -begin or end, 1 << (end - begin).bit_length() - 1)
        found.append((begin, begin + size))
        begin += size
    return found


def add_subtree(out: torch.Tensor, leaves: Sequence[torch.Tensor]) -> None:
    """`out` becomes the node above all leaves of a complete subtree. The leaves are only read, and may have a shorter dtype."""
    for block in _blocks(out.numel(), out.device):
        waiting: list[tuple[int, torch.Tensor, bool]] = []
        for leaf in leaves:
            _push(waiting, 0, leaf[block].to(out.dtype))
        [(_, value, _)] = waiting
        out[block].copy_(value)


class TreeSum:
    """The sums of 1-D tensors of `numel` elements over the slices. `dtype`: of the sums, at least fp32."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._numel, self._dtype, self._device = numel, dtype, device
        self._nodes: list[tuple[int, torch.Tensor]] = []  # level and sum of the nodes that wait, the lowest level last

    def add(self, nodes: Sequence[torch.Tensor], levels: Sequence[int] | None = None) -> None:
        """Add the next nodes of the tree, in order: slices, or nodes of these levels.

        They are only read, and may have a shorter dtype.
        """
        if levels is None:
            levels = [0] * len(nodes)
        after, kept = self._after(levels)
        sums = [(level, torch.empty(self._numel, dtype=self._dtype, device=self._device) if old is None else old)
                for level, old in zip(after, kept, strict=True)]  # fmt: skip
        for block in _blocks(self._numel, self._device):
            waiting = [(level, node[block], True) for level, node in self._nodes]
            for level, node in zip(levels, nodes, strict=True):
                _push(waiting, level, node[block].to(self._dtype))
            for (_, value, is_kept), (_, total) in zip(waiting, sums, strict=True):
                if not is_kept:
                    total[block].copy_(value)
        self._nodes = sums

    def _after(self, levels: Sequence[int]) -> tuple[list[int], list[torch.Tensor | None]]:
        """The levels of the nodes that wait after more of these levels, and the memory of those that grow out of nodes of now."""
        stack: list[tuple[int, torch.Tensor | None]] = list(self._nodes)
        for level in levels:
            memory = None
            while stack and stack[-1][0] == level:
                level, memory = level + 1, stack.pop()[1]
            stack.append((level, memory))
        return [level for level, _ in stack], [memory for _, memory in stack]

    def take(self, factor: float) -> torch.Tensor:
        """The sum over all slices, multiplied by `factor`, after the last one. The next leaf is slice 0 again."""
        [(_, total)] = self._nodes
        self._nodes = []
        return total.mul_(factor)

    def reset(self) -> None:
        """Begin again with slice 0."""
        self._nodes = []


def _blocks(numel: int, device: torch.device) -> Iterator[slice]:
    step = _BLOCK if device.type == "cpu" else max(numel, 1)
    for begin in range(0, numel, step):
        yield slice(begin, begin + step)


def _push(waiting: list[tuple[int, torch.Tensor, bool]], level: int, node: torch.Tensor) -> None:
    """Add a node to those that wait: (level, sum, whether the sum is in memory that stays)."""
    value, is_own, is_kept = node, False, False
    while waiting and waiting[-1][0] == level:
        _, left, is_kept = waiting.pop()
        # Addition is commutative, bit for bit, so either operand may take the sum.
        if is_kept:
            value = left.add_(value)
        else:
            value = value.add_(left) if is_own else torch.add(left, value)
        level, is_own = level + 1, True
    waiting.append((level, value, is_kept))
