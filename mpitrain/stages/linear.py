"""The linear layers of a stage. Their backwards can leave the gradients of the weights for later, or add them in place."""

from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mpitrain.torch_glue.products import product, rows
from mpitrain.torch_glue.weight_gradients import Gradients, now_or_later, weight_gradient


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, as_torch: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.params, ctx.as_torch = (weight, bias), as_torch
        ctx.set_materialize_grads(False)
        return product(x, weight.t(), bias, as_torch=as_torch)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        if grad is None:  # as torch's own: what the loss does not depend on has no gradient
            return None, None, None, None
        (x, weight), as_torch = ctx.saved_tensors, ctx.as_torch
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad

        def products() -> Gradients:
            of_weight = weight_gradient(ctx.params[0], grad, x, as_torch=as_torch) if needs_weight else None
            return of_weight, rows(grad).sum(0) if needs_bias else None

        of_x = product(grad, weight, as_torch=as_torch) if needs_x else None
        return of_x, *now_or_later(ctx.params, products), None


class _StageLinear(nn.Linear):
    has_torch_products = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        # autocast casts the operands of torch's own functions. A weight that is computed has a graph, through which one backward goes.
        # For an input with gaps torch may take another kernel.
        is_own = self.weight.is_leaf and (input.is_contiguous() or not self.has_torch_products)
        if not is_own or torch.is_autocast_enabled(input.device.type):
            return super().forward(input)
        return _Linear.apply(input, self.weight, self.bias, self.has_torch_products)


def take_linear_layers(model: nn.Module) -> None:
    """Let the linear layers of a model follow `weight_gradients.waiting` and `added_in_place`."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = _StageLinear


def take_torch_products(model: nn.Module) -> None:
    """Let these layers compute as torch's own do, with the same bits as without a pipeline: see products.py for the difference.

    The products of the backward are those of torch's derivatives of `addmm` and `mm`, with the same strides.
    """
    for module in model.modules():
        if isinstance(module, _StageLinear):
            module.has_torch_products = True
