"""How often the host looks at numbers that a device has computed: each look waits until the device has come to them."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import mpitrain
from collectives import Communicator

pytestmark = pytest.mark.ranks(2)

READS = ("item", "tolist", "cpu", "__bool__", "__float__", "__int__")


@contextmanager
def counted_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The reads of tensors' elements in the block."""
    reads: list[str] = []
    with monkeypatch.context() as patch:
        for name in READS:
            method = getattr(torch.Tensor, name)

            def counted(self: torch.Tensor, *args: object, method: object = method, name: str = name) -> object:
                reads.append(name)
                return method(self, *args)  # type: ignore[operator]

            patch.setattr(torch.Tensor, name, counted)
        yield reads


def model_of(comm: Communicator, num_layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = mpitrain.fully_shard(nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers))), comm)
    model(torch.ones(2, 4)).square().mean().backward()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_clipping_waits_once(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each parameter, of which a large model has hundreds."""
    numbers = []
    for num_layers in (3, 30):
        model, _ = model_of(comm, num_layers)
        with counted_reads(monkeypatch) as reads:
            mpitrain.clip_grad_norm_(model, 0.01)
        numbers.append(len(reads))
    assert numbers[0] == numbers[1] <= 4, (
        "the norms of shards, of what is on every rank; the common norm; whether it is finite"
    )


def test_unscaling_waits_once(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = []
    for num_layers in (3, 30):
        model, optimizer = model_of(comm, num_layers)
        scaler = mpitrain.GradScaler(model, scale=4.0)
        with counted_reads(monkeypatch) as reads:
            scaler.unscale_(optimizer)
        numbers.append(len(reads))
    assert numbers[0] == numbers[1] <= 2, "whether all are finite here; whether they are on all ranks"


def test_the_norms_of_parameters_wait_once(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = []
    for num_layers in (3, 30):
        model, _ = model_of(comm, num_layers)
        with counted_reads(monkeypatch) as reads:
            mpitrain.grad_norms(model)
        numbers.append(len(reads))
    assert numbers[0] == numbers[1] <= 3


def test_gradients_of_several_dtypes(comm: Communicator) -> None:
    """Are read together, dtype by dtype, and give the norm that each gives by itself."""
    torch.manual_seed(0)
    plain = nn.ParameterList(
        nn.Parameter(torch.randn(3, 5).to(t)) for t in (torch.float32, torch.bfloat16, torch.float64)
    )
    for param in plain:
        param.grad = torch.randn(3, 5).to(param.dtype)
    expected = copy.deepcopy([param.grad for param in plain])
    norm = mpitrain.clip_grad_norm_(plain, 0.5)
    by_hand = sum(grad.double().norm() ** 2 for grad in expected) ** 0.5
    assert norm.dtype == torch.float64
    torch.testing.assert_close(norm, torch.as_tensor(by_hand), rtol=1e-6, atol=0)
    for param, grad in zip(plain, expected, strict=True):
        assert param.grad is not None
        torch.testing.assert_close(param.grad, grad * (0.5 / (norm.item() + 1e-6)))


def test_a_model_without_gradients(comm: Communicator) -> None:
    model, _ = model_of(comm, 1)
    model.zero_grad()
    assert mpitrain.clip_grad_norm_(model, 1e-9).item() == 0
    assert comm.size > 0
