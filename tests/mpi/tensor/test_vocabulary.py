"""The cross-entropy of logits whose classes are cut is torch's, with all its options."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from collectives import Communicator
from mpitrain.tensor import cross_entropy, vocabulary
from mpitrain.tensor.exchange import bounds


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("num_classes", [2, 37])
@pytest.mark.parametrize("chunk", [1, 1 << 22])
def test_it_is_torch_s(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, reduction: Any, smoothing: float, num_classes: int, chunk: int
) -> None:
    monkeypatch.setattr(vocabulary, "_CHUNK_ELEMENTS", chunk)
    generator = torch.Generator().manual_seed(num_classes)
    whole = (10 * torch.randn(13, num_classes, generator=generator)).requires_grad_()
    targets = torch.randint(0, num_classes, (13,), generator=generator)
    targets[[0, 5]] = 1000  # does not count
    begin, end = bounds(num_classes, comm.size)[comm.rank : comm.rank + 2]
    mine = whole.detach()[:, begin:end].clone().requires_grad_()
    weights = torch.rand(13 if reduction == "none" else 1, generator=generator)
    expected = F.cross_entropy(whole, targets, ignore_index=1000, label_smoothing=smoothing, reduction=reduction)
    found = cross_entropy(
        mine, targets, comm, num_classes=num_classes, ignore_index=1000, label_smoothing=smoothing, reduction=reduction
    )
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)
    (expected * weights).sum().backward()
    before = mine.detach().clone()
    (found * weights).sum().backward()
    assert torch.equal(mine, before)  # the logits themselves are not written
    assert whole.grad is not None and mine.grad is not None
    torch.testing.assert_close(mine.grad, whole.grad[:, begin:end], rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(2)
def test_no_row_counts(comm: Communicator) -> None:
    loss = cross_entropy(torch.zeros(3, 2), torch.full((3,), -100), comm, num_classes=4)
    assert loss.isnan()
