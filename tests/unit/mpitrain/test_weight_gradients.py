"""Backwards in two halves: both together give what one backward gives."""

import pytest
import torch

from mpitrain.tensor.regions import column_product
from mpitrain.torch_glue.weight_gradients import compute, waiting


@pytest.mark.parametrize("trained", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_two_halves_make_a_backward(trained: tuple[bool, bool], is_transposed: bool) -> None:
    """Also of a weight that is a view of the parameter, and of layers of which not all parameters are trained."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, requires_grad=True)
    weight = torch.randn((4, 5) if is_transposed else (5, 4), requires_grad=trained[0])
    bias = torch.randn(5, requires_grad=trained[1])

    def forward() -> torch.Tensor:
        return column_product(x, weight.t() if is_transposed else weight, bias, None).square().sum()

    forward().backward()
    found = [x, weight, bias]
    expected = [param.grad for param in found]
    for param in found:
        param.grad = None
    loss = forward()
    with waiting() as later:
        loss.backward()
    assert x.grad is not None
    assert weight.grad is None
    assert bias.grad is None
    assert len(later) == any(trained)
    compute(later)
    for param, grad in zip(found, expected, strict=True):
        assert (param.grad is None) == (grad is None) == (not param.requires_grad)
        assert grad is None or param.grad is None or torch.equal(param.grad, grad)
