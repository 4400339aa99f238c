"""Backwards in two halves: the gradient of a stage's input first, and the gradients of the weights of its linear layers later.

A linear layer's backward has two products, one for each half. In a block `with waiting() as later:` a backward computes the first
product alone, and `later` collects the second one. Gradients of other parameters, such as norms, take little time and do not wait.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

Gradients = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Parameters, and a gradient of each."""

Later = list[Callable[[], Gradients]]
"""What a backward has left for later."""

_later: Later | None = None  # of the backward that runs now


@contextmanager
def waiting() -> Iterator[Later]:
    """Let the backwards in the block collect the products for the gradients of weights."""
    global _later  # the engine calls the backwards, which get no argument
    _later = []
    try:
        yield _later
    finally:
        _later = None


def compute(later: Later) -> None:
    """Compute what a backward has left for later, and accumulate it as a backward does, with the hooks of the parameters."""
    params: list[torch.Tensor] = []
    grads: list[torch.Tensor] = []
    for product in later:
        for param, grad in zip(*product(), strict=True):
            params.append(param)
            grads.append(grad)
    later.clear()
    if params:
        torch.autograd.backward(params, grads)


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.params = [param for param in (weight, bias) if param is not None and param.requires_grad]
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad

        def products() -> tuple[torch.Tensor | None, torch.Tensor | None]:
            rows = grad.reshape(-1, grad.shape[-1])
            of_weight = rows.t() @ x.reshape(-1, x.shape[-1]) if needs_weight else None
            return of_weight, rows.sum(0) if needs_bias else None

        of_x = grad @ weight if needs_x else None
        if _later is None or not ctx.params:
            return of_x, *products()
        params = ctx.params
        _later.append(lambda: (params, [found for found in products() if found is not None]))
        return of_x, None, None


class _SplitLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(input.device.type):  # it casts the operands of torch's own functions
            return super().forward(input)
        return _Linear.apply(input, self.weight, self.bias)


def split_backwards(model: nn.Module) -> None:
    """Let the linear layers of a model leave the gradients of their weights for later, in a block of `waiting`."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = _SplitLinear
