"""LAMB and LARS on plain parameters, against the formulae of the papers in float64."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mpitrain.optim import LAMB, LARS
from mpitrain.optim.whole_norms import WholeNorms

SHAPES = [(13, 7), (5,), (2, 3, 4), (1, 1), ()]
STEPS = 4
Rule = Callable[[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], int], torch.Tensor]


def lamb(
    lr: float = 0.1, wd: float = 0.3, eps: float = 1e-3, corrects: bool = True, clips: bool = False, adapts: bool = True
) -> Rule:
    """Algorithm 2 of arXiv:1904.00962, with phi(x) = x, and limited to 1 if it clips."""

    def rule(w: torch.Tensor, g: torch.Tensor, state: dict[str, torch.Tensor], t: int) -> torch.Tensor:
        m = state["m"] = 0.9 * state.get("m", 0 * w) + 0.1 * g
        v = state["v"] = 0.99 * state.get("v", 0 * w) + 0.01 * g * g
        u = (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + eps) if corrects else m / (v.sqrt() + eps)
        u = u + wd * w
        ratio = w.norm() / u.norm() if adapts and w.norm() > 0 and u.norm() > 0 else torch.tensor(1.0)
        return w - lr * (ratio.clamp(max=1.0) if clips else ratio) * u

    return rule


def lars(lr: float = 5.0, wd: float = 0.3, momentum: float = 0.8, clips: bool = False, adapts: bool = True) -> Rule:
    """Algorithm 1 of arXiv:1708.03888, with the learning rate outside of the momentum; LARC if it clips."""

    def rule(w: torch.Tensor, g: torch.Tensor, state: dict[str, torch.Tensor], t: int) -> torch.Tensor:
        ratio = torch.tensor(1.0)
        if adapts and w.norm() > 0 and g.norm() > 0:
            ratio = 0.02 * w.norm() / (g.norm() + wd * w.norm() + 1e-8)
            ratio = (ratio / lr).clamp(max=1.0) if clips else ratio
        b = state["b"] = momentum * state.get("b", 0 * w) + ratio * (g + wd * w)
        return w - lr * b

    return rule


LAMB_SETTINGS: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-3, "weight_decay": 0.3}
LARS_SETTINGS: dict[str, Any] = {"lr": 5.0, "weight_decay": 0.3, "momentum": 0.8, "trust_coefficient": 0.02}


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda params: LAMB(params, **LAMB_SETTINGS), lamb()),
        (lambda params: LAMB(params, **LAMB_SETTINGS, bias_correction=False), lamb(corrects=False)),
        (lambda params: LAMB(params, **LAMB_SETTINGS, trust_clip=True), lamb(clips=True)),
        (lambda params: LAMB(params, **LAMB_SETTINGS | {"weight_decay": 0.0}), lamb(wd=0.0, adapts=False)),
        (lambda params: LAMB(params, **LAMB_SETTINGS | {"weight_decay": 0.0}, always_adapt=True), lamb(wd=0.0)),
        (lambda params: LARS(params, **LARS_SETTINGS), lars()),
        (lambda params: LARS(params, **LARS_SETTINGS | {"momentum": 0.0}), lars(momentum=0.0)),
        (lambda params: LARS(params, **LARS_SETTINGS | {"lr": 0.002}, trust_clip=True), lars(lr=0.002, clips=True)),
        (lambda params: LARS(params, **LARS_SETTINGS | {"weight_decay": 0.0}), lars(wd=0.0, adapts=False)),
    ],
)
def test_the_numbers_of_the_paper(make: Callable[[list[torch.Tensor]], torch.optim.Optimizer], rule: Rule) -> None:
    """Also of a matrix of zeros, and of a parameter that has no gradient at first."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    params.append(torch.nn.Parameter(torch.zeros(3, 3)))
    expected = [param.detach().double() for param in params]
    states: list[dict[str, torch.Tensor]] = [{} for _ in params]
    taken = [0] * len(params)
    optimizer = make(list(params))
    for step in range(STEPS):
        for index, param in enumerate(params):
            grad = torch.randn(param.shape, generator=generator)
            param.grad = None if step < 2 and index == 0 else grad
            if param.grad is not None:
                taken[index] += 1
                expected[index] = rule(expected[index], grad.double(), states[index], taken[index])
        optimizer.step()
        if step == 1:  # a copy goes on as the optimizer does
            params, optimizer = copied(params, optimizer)
    for param, value in zip(params, expected, strict=True):
        torch.testing.assert_close(param.detach().double(), value, rtol=2e-6, atol=1e-6)


def copied(
    params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
    return copy.deepcopy((params, optimizer))


def test_complex_and_half_precision_and_other_layouts_of_gradients() -> None:
    """A complex number is two real ones to Adam, and a gradient may lie in memory in another order than its parameter."""
    generator = torch.Generator().manual_seed(0)
    for kind, lr in ((LAMB, 0.1), (LARS, 50.0)):
        values = torch.randn(5, 3, 2, generator=generator)
        pairs = torch.nn.Parameter(values.clone()), torch.nn.Parameter(torch.view_as_complex(values.clone()))
        halves = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
        optimizer = kind([*pairs, halves], lr=lr, weight_decay=0.1)
        for _ in range(2):
            grad = torch.randn(5, 3, 2, generator=generator)
            pairs[0].grad = grad.transpose(0, 1).contiguous().transpose(0, 1)
            pairs[1].grad = torch.view_as_complex(grad)
            halves.grad = torch.ones(4, 4, dtype=torch.bfloat16)
            optimizer.step()
        torch.testing.assert_close(torch.view_as_real(pairs[1]), pairs[0])
        assert (halves < 1).all()


def test_norms_of_long_tensors_are_exact() -> None:
    """torch's own norm on CPUs would be off by 1e-4."""
    x = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0)) + 1
    ((norm, none),) = WholeNorms([x, x]).of([x, None])
    assert norm == pytest.approx(x.double().norm().item(), rel=1e-7) and none == 0


def test_wrong_settings_and_sparse_gradients() -> None:
    param = torch.nn.Parameter(torch.zeros(2, 2))
    for kind, setting, value in ((LAMB, "lr", -1.0), (LAMB, "eps", float("nan")), (LARS, "momentum", -0.1)):
        with pytest.raises(ValueError, match=rf"{kind.__name__}: {setting} {value}; expected at least 0"):
            kind([param], **{setting: value})
    with pytest.raises(ValueError, match=r"LAMB: betas \(0\.9, 1\.0\); expected at least 0 and less than 1"):
        LAMB([param], betas=(0.9, 1.0))
    param.grad = torch.zeros(2, 2).to_sparse()
    with pytest.raises(RuntimeError, match="LAMB: a gradient is sparse; expected dense gradients"):
        LAMB([param]).step()
