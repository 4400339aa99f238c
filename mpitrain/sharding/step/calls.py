"""The calls of one unit's module whose backward may still come, and a notice when the backwards of all these calls have ended.

An autograd function around each call is notified when the gradients of the call's inputs are complete. Then the call has computed all
its gradients and no longer needs its parameters. FSDP2 does the same (`RegisterPostBackwardFunction`). A module may be called several
times in a forward, and a backward may go through a graph several times. So the calls are counted by nodes of the graph, as long as
these nodes live.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from mpitrain.sharding.step.arguments import flatten
from mpitrain.torch_internals import is_freed


class Calls:
    """The calls of one unit. A backward that has gone through all of them calls `all_back()`."""

    def __init__(self, all_back: Callable[[], None]) -> None:
        self._all_back = all_back
        # Weak: the graph of a forward without a backward is freed with the forward's output, without a notice.
        self._alive: weakref.WeakSet[Any] = weakref.WeakSet()
        self._back: weakref.WeakSet[Any] = weakref.WeakSet()

    def watch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, watched: their gradients notify this object. Arguments without gradients stay as they are."""
        leaves, rebuild = flatten(args, kwargs)
        watched = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not watched:
            return (
                args,
                kwargs,
            )  # no gradient flows to these inputs: the end of the whole backward is the end of this call
        passed = _Watched.apply(self, *(leaves[i] for i in watched))
        for i, tensor in zip(watched, passed, strict=True):
            leaves[i] = tensor
        return rebuild(leaves)

    def begin(self, node: Any) -> None:
        """Record a call. The gradients of its inputs come to `node`."""
        self._alive.add(node)

    def come_back(self, node: Any) -> None:
        """Called when the gradients of a call's inputs are complete."""
        self._back.add(node)
        if all(other in self._back or is_freed(other) for other in self._alive):
            self._all_back()

    def end_backward(self) -> None:
        """End the backward. The next backward may go through the same calls."""
        self._back.clear()

    def forget(self) -> None:
        """Forget all calls, because their backward will not come."""
        self._alive.clear()
        self._back.clear()


class _Watched(torch.autograd.Function):
    """Passes tensors on unchanged. Its backward notifies `calls`."""

    @staticmethod
    def forward(ctx: Any, calls: Calls, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.calls = calls
        # A tensor that the call does not use has no gradient, as without this function.
        ctx.set_materialize_grads(False)
        calls.begin(ctx)
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.calls.come_back(ctx)
        return (None, *grads)
