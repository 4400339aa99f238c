"""One sharded module: what happens around its forward and in its backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from mpitrain.sharding.context import Context, Phase
from mpitrain.sharding.policy import MixedPrecisionPolicy
from mpitrain.sharding.ranks import Ranks
from mpitrain.sharding.unit import Unit


class State:
    """The units of one module and where they are in a step. `context` is set at the first forward of the outermost module."""

    def __init__(
        self,
        ranks: Ranks,
        units: list[Unit],
        policy: MixedPrecisionPolicy,
        *,
        stage: int,
        reshard_after_forward: bool,
    ) -> None:
        self.ranks = ranks
        self.units = units
        self.policy = policy
        self.reshard_after_forward = reshard_after_forward
        self.reduces_early = stage != 1  # as soon as this module's gradients are there, not at the end of the backward
        self.context: Context | None = None
        self.sync_gradients = True
        self.complete = False  # this backward has brought all gradients of this module
        self._pending = 0  # forwards whose backward has not come yet: a module may be used twice

    # Around forward

    def forward(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], context: Context) -> Any:
        """Run the module's own forward with full parameters in place. `context` is this module's own."""
        if _in_backward():
            # Activation checkpointing recomputes: not a new forward, and what follows needs the parameters still.
            context.begin_backward()  # a reentrant one may be the first that is seen of this backward
            self.unshard()
            args, kwargs = self._cast_inputs(args, kwargs)
            return self._cast_outputs(call(*args, **kwargs))
        outermost = context.phase is not Phase.FORWARD
        if outermost:
            context.open()
        try:
            self.unshard()
            args, kwargs = self._watch_inputs(*self._cast_inputs(args, kwargs))
            output = self._watch_outputs(self._cast_outputs(call(*args, **kwargs)))
        except BaseException:
            if outermost:
                context.reset()  # no fence: the other ranks may be anywhere
            raise
        # The outermost module's backward comes first: what it holds stays gathered for it.
        self._reshard(keep=not self.reshard_after_forward or (outermost and torch.is_grad_enabled()))
        if outermost:
            context.close()
        return output

    def unshard(self) -> None:
        """Full parameters, filled and shown. Idempotent. Collective where units are private."""
        for unit in self.units:
            if self.context is not None and not unit.storage.lasts:
                with self.context.communicating():
                    unit.gather()
            else:
                unit.gather()
            unit.show_full()

    def _reshard(self, *, keep: bool = False) -> None:
        for unit in self.units:
            unit.show_shards()
            if not keep:
                unit.release()

    def reshard(self) -> None:
        """Shards shown, the memory of gathered parameters given back. Idempotent."""
        self._reshard()

    def reset(self) -> None:
        """As if no forward had begun."""
        self._pending = 0
        self.complete = False
        self._reshard()
        for unit in self.units:
            unit.drop_grads()

    def _cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        dtype = self.policy.param_dtype
        if dtype is None or not self.policy.cast_forward_inputs:
            return args, kwargs
        return tree_map(_caster(dtype), args), tree_map(_caster(dtype), kwargs)

    def _cast_outputs(self, output: Any) -> Any:
        dtype = self.policy.output_dtype
        return output if dtype is None else tree_map(_caster(dtype), output)

    # In backward

    def _watch_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Learn when the gradients of the inputs are there: by then those of the parameters are too."""
        if not torch.is_grad_enabled():
            return args, kwargs
        leaves, spec = tree_flatten((args, kwargs))
        watched = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not watched:
            return args, kwargs  # nothing flows back through it: complete at the end of the backward
        self._pending += 1
        passed = _AfterBackward.apply(self, *(leaves[i] for i in watched))
        for i, tensor in zip(watched, passed, strict=True):
            leaves[i] = tensor
        return tree_unflatten(leaves, spec)

    def _watch_outputs(self, output: Any) -> Any:
        """Have the parameters in place before a gradient flows into the module."""
        if torch.is_grad_enabled():
            for leaf in tree_flatten(output)[0]:
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(self._before_backward)
        return output

    def _before_backward(self, grad: torch.Tensor) -> torch.Tensor:
        assert self.context is not None
        self.context.begin_backward()
        self.unshard()
        return grad

    def after_backward(self) -> None:
        """The gradients of one forward's inputs are there."""
        assert self.context is not None
        self._pending -= 1
        if self._pending <= 0:
            self._pending = 0
            self._reshard()
            self.complete = self.reduces_early
            self.context.reduce_complete()

    def end_backward(self) -> None:
        """The whole backward has ended."""
        self._pending = 0
        self._reshard()
        self.complete = True


class _AfterBackward(torch.autograd.Function):
    """Passes tensors on unchanged; its backward tells the module's state that it is through."""

    @staticmethod
    def forward(ctx: Any, state: State, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.state = state
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.state.after_backward()
        return (None, *grads)


def _in_backward() -> bool:
    """Whether the autograd engine is running on this thread."""
    return torch._C._current_graph_task_id() != -1


def _caster(dtype: torch.dtype) -> Callable[[Any], Any]:
    return lambda leaf: leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf
