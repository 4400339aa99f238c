"""When a rank is in which layer of a model, forward and backward: for profiles and traces.

The layers are those of the model's `stage_plan`: "embedding", "blocks.0", "blocks.1" and so on, and "head" (the last norm, the
logits and the loss). A rank of a pipeline has the layers of its stages.

A forward begins and ends with a module's call. In a backward there are no calls: a layer's backward begins when the gradient of its
output is complete, which a hook of this tensor tells, and lasts until that of the layer before begins, or until the engine has computed
all gradients. autograd runs later nodes first, so the gradients of a layer's weights are within it. What a checkpoint computes again
belongs to the backward of its layer. The hooks return nothing, so all numbers stay the same.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from mpitrain.plans.stage_plan import StagePlan

if TYPE_CHECKING:
    import torch
    from torch import nn

Kind = Literal["forward", "backward"]
Mark = Callable[[str, Kind], None]
"""Gets a layer and a kind."""


def layers_of(model: "nn.Module") -> "dict[str, list[nn.Module]]":
    """The modules of each layer that this rank has. ValueError for a model without a `stage_plan`."""
    plan = getattr(model, "stage_plan", None)
    if not isinstance(plan, StagePlan):
        raise ValueError(f"expected a model with a stage_plan, whose layers are known, got {type(model).__name__}")
    found = {"embedding": _there(model, plan.first)}
    for key, block in model.get_submodule(plan.blocks).named_children():
        found[f"blocks.{key}"] = [block]
    found["head"] = _there(model, plan.last)
    return {name: modules for name, modules in found.items() if modules}


def _there(model: "nn.Module", names: tuple[str, ...]) -> "list[nn.Module]":
    """A rank of a pipeline lacks the modules of other stages."""
    modules = dict(model.named_modules())
    return [modules[name] for name in names if name in modules]


@contextmanager
def layer_ranges(model: "nn.Module", enter: Mark, leave: Mark) -> Iterator[None]:
    """Within the block, `enter` and `leave` are called around the forwards and backwards of the model's layers.

    No range is within another one, and each `leave` names the range that was entered last. On a GPU the backward's calls come from
    autograd's thread, while the thread that trains waits for it. A range that an exception has left has no `leave`.

    Raises:
        ValueError: a model without a `stage_plan`.
    """
    ranges = _Ranges(enter, leave)
    handles = []
    for name, modules in layers_of(model).items():
        for module in modules:
            # The first hook before a call, and the last one after it: other hooks belong to the layer.
            handles.append(module.register_forward_pre_hook(partial(ranges.begin_forward, name), prepend=True))
            handles.append(module.register_forward_hook(partial(ranges.end_forward, name)))
    try:
        yield
    finally:
        ranges.is_on = False
        for handle in handles:
            handle.remove()


class _Ranges:
    def __init__(self, enter: Mark, leave: Mark) -> None:
        self._enter, self._leave = enter, leave
        self._backward: str | None = None  # the layer whose backward runs
        self.is_on = True  # hooks of tensors may live longer than the block

    def begin_forward(self, name: str, module: "nn.Module", args: Any) -> None:
        from mpitrain.torch_glue.torch_internals import in_backward

        if not in_backward():
            self._backward = None  # an exception may have ended the last backward
            self._enter(name, "forward")

    def end_forward(self, name: str, module: "nn.Module", args: Any, output: Any) -> None:
        import torch
        from torch.utils._pytree import tree_leaves

        from mpitrain.torch_glue.torch_internals import hook_gradient, in_backward

        if in_backward():
            return
        self._leave(name, "forward")
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                hook_gradient(tensor, partial(self._begin_backward, name))

    def _begin_backward(self, name: str, grad: "torch.Tensor") -> None:
        from mpitrain.torch_glue.torch_internals import at_end_of_backward

        if not self.is_on or self._backward == name:
            return
        if self._backward is None:
            at_end_of_backward(self._end_backward)
        else:
            self._leave(self._backward, "backward")
        self._backward = name
        self._enter(name, "backward")

    def _end_backward(self) -> None:
        if self._backward is not None and self.is_on:
            self._leave(self._backward, "backward")
        self._backward = None
