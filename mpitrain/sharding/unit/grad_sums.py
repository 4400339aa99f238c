"""Sums of gradients over several backwards, in more bits than the gradients have.

A sum in bfloat16 loses each summand that is below 1/512 of it, so its error grows with the number of backwards. FSDP2 keeps full
gradients of earlier backwards in `reduce_dtype` (`to_accumulated_grad_if_needed` in `_fsdp_param.py`), and Megatron-LM in its
`main_grad`.
"""

from collections.abc import Sequence

import torch

from mpitrain.sharding.unit.parameter import ShardedParameter


class WaitingSums:
    """The sums of full gradients that wait for their reduction, if the gradients have fewer bits than `reduce_dtype`.

    Gradients with as many bits wait where autograd adds them up, and so do sparse ones and those that a graph has.
    """

    def __init__(self, params: Sequence[ShardedParameter], reduce_dtype: torch.dtype) -> None:
        self._params = params
        dtype = params[0].full.dtype
        self._dtype = torch.promote_types(dtype, reduce_dtype)
        self._is_wider = self._dtype != dtype
        self._sums: dict[int, torch.Tensor] = {}

    def __contains__(self, index: int) -> bool:
        """Whether a gradient of parameter `index` waits."""
        return index in self._sums or self._params[index].full.grad is not None

    def __bool__(self) -> bool:
        """Whether any gradient waits."""
        return any(index in self for index in range(len(self._params)))

    @torch.no_grad()
    def add(self, index: int) -> None:
        """Let the full gradient of parameter `index` wait for those of further backwards."""
        full = self._params[index].full
        grad = full.grad
        if not self._is_wider or grad is None or grad.requires_grad or grad.layout != torch.strided:
            return
        if index in self._sums:
            self._sums[index] += grad
        else:
            self._sums[index] = grad.to(self._dtype)
        full.grad = None

    def take(self, index: int) -> torch.Tensor | None:
        """Take the sum of parameter `index`, with the full gradient of the last backward."""
        full = self._params[index].full
        grad = full.grad
        if grad is not None:
            full.grad = None
        if index not in self._sums:
            return grad
        total = self._sums.pop(index)
        if grad is not None:
            with torch.no_grad():
                total += grad
        return total

    def reset(self) -> None:
        """Drop all of them."""
        self._sums.clear()
        for param in self._params:
            param.full.grad = None


class ShardSums:
    """The sums of several reductions, if the gradients of the shards have fewer bits than `reduce_dtype`.

    Each sum counts where the gradient is still its rounding. Elsewhere the program has written the gradient since.
    """

    def __init__(self, dtype: torch.dtype, reduce_dtype: torch.dtype) -> None:
        self._dtype = torch.promote_types(dtype, reduce_dtype)
        self._is_wider = self._dtype != dtype
        self._sums: dict[torch.nn.Parameter, torch.Tensor] = {}

    def add(self, shard: torch.nn.Parameter, mean: torch.Tensor) -> None:
        """Add a mean to the gradient of a shard. Within `torch.no_grad()`."""
        grad, mean = shard.grad, mean.to(shard.device)
        assert grad is not None
        if not self._is_wider:
            grad += mean
            return
        total = self._sums.get(shard)
        if total is None:
            total = grad.to(self._dtype)
        else:
            torch.where(total.to(grad.dtype) == grad, total, grad, out=total)
        self._sums[shard] = total.add_(mean)
        grad.copy_(total)

    def reset(self, shard: torch.nn.Parameter) -> None:
        """The next mean becomes the gradient of a shard that has none."""
        self._sums.pop(shard, None)
