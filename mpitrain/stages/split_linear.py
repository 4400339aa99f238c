"""Plain linear layers whose backwards can leave the gradients of their weights for later."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mpitrain.weight_gradients import Gradients, now_or_later


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.params = weight, bias
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad

        def products() -> Gradients:
            rows = grad.reshape(-1, grad.shape[-1])
            of_weight = rows.t() @ x.reshape(-1, x.shape[-1]) if needs_weight else None
            return of_weight, rows.sum(0) if needs_bias else None

        of_x = grad @ weight if needs_x else None
        return of_x, *now_or_later(ctx.params, products)


class _SplitLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(input.device.type):  # it casts the operands of torch's own functions
            return super().forward(input)
        return _Linear.apply(input, self.weight, self.bias)


def split_backwards(model: nn.Module) -> None:
    """Let the linear layers of a model leave the gradients of their weights for later, in a block of `weight_gradients.waiting`."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = _SplitLinear
