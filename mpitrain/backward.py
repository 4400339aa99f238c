"""A backward from given gradients, without torch's symbolic shapes."""

from collections.abc import Sequence
from typing import Any

import torch


class _Given(torch.autograd.Function):
    """A number whose gradient in its inputs is given."""

    @staticmethod
    def forward(ctx: Any, grads: Sequence[torch.Tensor], *outputs: torch.Tensor) -> torch.Tensor:
        ctx.grads = grads
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, *ctx.grads


def backward(outputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
    """`torch.autograd.backward(outputs, grads)`, which checks the shapes of `grads` by sympy: an import of 0.25 s and 35 MB.

    RuntimeError if a gradient has another shape than its output.
    """
    with torch.enable_grad():
        _Given.apply(grads, *outputs).backward()
