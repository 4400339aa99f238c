"""A backward from given gradients is torch's, without the import that torch's needs."""

import subprocess
import sys

import pytest
import torch
from launching import ROOT

from mpitrain.torch_glue.torch_internals import backward


def test_the_gradients_are_those_of_torch() -> None:
    found = []
    for way in (backward, torch.autograd.backward):
        torch.manual_seed(0)
        weight, leaf = torch.randn(5, 3, requires_grad=True), torch.randn(2, requires_grad=True)
        seen: list[int] = []
        leaf.register_post_accumulate_grad_hook(lambda _, seen=seen: seen.append(1))
        for _ in range(2):  # the second time, the gradients are added up
            way([torch.randn(4, 5) @ weight, leaf], [torch.randn(4, 3), torch.randn(2)])
        assert len(seen) == 2
        assert weight.grad is not None
        assert leaf.grad is not None
        found.append(torch.cat([weight.grad.flatten(), leaf.grad]))
    assert torch.equal(*found)


def test_a_gradient_of_another_shape() -> None:
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="shape"):
        backward([x], [torch.randn(4)])


def test_it_imports_no_sympy() -> None:
    program = (
        "import sys, torch\nfrom mpitrain.torch_glue.torch_internals import backward\nx = torch.ones(3, requires_grad=True)\n"
        "with torch.no_grad():\n    backward([x], [x.detach()])\n"
        "assert x.grad.tolist() == [1, 1, 1]\nassert 'sympy' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
