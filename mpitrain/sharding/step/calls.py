"""The forwards of one unit's module whose backward may still come, and the moment at which all of them have come back.

An autograd function around each call sees when the gradients of the call's inputs are there: by then the call needs its parameters no
more, and has given all their gradients. FSDP2 does the same (`RegisterPostBackwardFunction`). A module may be called several times in a
forward, and a backward may go through a graph several times. So the calls are counted by the nodes of the graph, while those live.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from mpitrain.sharding.step.arguments import flatten
from mpitrain.sharding.torch_internals import is_freed


class Calls:
    """Of one unit. `all_back()` is called when a backward has come back from all calls."""

    def __init__(self, all_back: Callable[[], None]) -> None:
        self._all_back = all_back
        # Weak: the graph of a forward that gets no backward goes with its output, and nothing says so.
        self._alive: weakref.WeakSet[Any] = weakref.WeakSet()
        self._back: weakref.WeakSet[Any] = weakref.WeakSet()

    def watch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, through which gradients come back to this object. Without gradients they stay as they are."""
        leaves, rebuild = flatten(args, kwargs)
        watched = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not watched:
            return args, kwargs  # the backward does not come back from this call: it ends with the whole backward
        passed = _Watched.apply(self, *(leaves[i] for i in watched))
        for i, tensor in zip(watched, passed, strict=True):
            leaves[i] = tensor
        return rebuild(leaves)

    def begin(self, node: Any) -> None:
        """A call begins, whose inputs' gradients come to `node`."""
        self._alive.add(node)

    def come_back(self, node: Any) -> None:
        """The gradients of a call's inputs are there."""
        self._back.add(node)
        if all(other in self._back or is_freed(other) for other in self._alive):
            self._all_back()

    def end_backward(self) -> None:
        """The next backward may come back from the same calls."""
        self._back.clear()

    def forget(self) -> None:
        """No backward of earlier calls comes."""
        self._alive.clear()
        self._back.clear()


class _Watched(torch.autograd.Function):
    """Passes tensors on unchanged. Its backward tells `calls`."""

    @staticmethod
    def forward(ctx: Any, calls: Calls, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.calls = calls
        calls.begin(ctx)
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.calls.come_back(ctx)
        return (None, *grads)
