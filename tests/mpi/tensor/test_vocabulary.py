"""The cross-entropy of logits whose classes are cut is torch's, with all its options."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import mpitrain
from collectives import Communicator
from mpitrain.parts import bounds, part_of
from mpitrain.tensor import Style, cross_entropy, vocabulary


@pytest.mark.ranks(2)
def test_float64(comm: Communicator) -> None:
    whole = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    begin, end = bounds(8, comm.size)[comm.rank : comm.rank + 2]
    found = cross_entropy(whole[:, begin:end], torch.arange(5), comm, num_classes=8)
    torch.testing.assert_close(found, F.cross_entropy(whole, torch.arange(5)), rtol=1e-14, atol=0)


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
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (2, 3, 4)], ids=str)
def test_logits_of_any_shape_in_a_plan(comm: Communicator, shape: tuple[int, ...], reduction: str) -> None:
    """The classes are dimension 1, as in torch."""
    torch.manual_seed(0)
    plain = nn.ModuleDict({"head": nn.Linear(4, 7), "loss": nn.CrossEntropyLoss(reduction=reduction, ignore_index=6)})
    x, targets = torch.randn(*shape, 4), torch.randint(0, 7, shape)
    cut = mpitrain.tensor_parallel(copy.deepcopy(plain), comm, {"head": Style("column"), "loss": Style("loss")})
    losses = []
    for model in (plain, cut):
        loss = model["loss"](model["head"](x).movedim(-1, min(len(shape), 1)), targets)  # type: ignore[index]
        loss.nan_to_num().sum().backward()
        losses.append(loss)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6, equal_nan=True)
    for whole, mine in zip(plain.parameters(), cut.parameters(), strict=True):
        part = part_of(mine)
        assert part is not None and whole.grad is not None and mine.grad is not None
        torch.testing.assert_close(mine.grad, part.take(whole.grad), rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(2)
def test_what_the_loss_refuses(comm: Communicator) -> None:
    logits, targets = torch.zeros(3, 2), torch.zeros(3, dtype=torch.long)
    more: dict[str, Any]
    for wrong, of, more, message in (
        (
            torch.zeros(3, 4),
            targets,
            {},
            r"logits of the shape \(3, 2\), with this rank's 2 of 4 classes, .* got \(3, 4\)",
        ),
        (logits, targets[:2], {}, r"of the shape \(2, 2\), .* for targets of the shape \(2,\), got \(3, 2\)"),
        (logits, targets[:, None], {}, r"of the shape \(3, 2, 1\), .* got \(3, 2\)"),
        (logits, torch.ones(3, 4), {}, r"expected targets of torch.int64, .* got torch.float32; probabilities"),
        (logits, targets, {"reduction": "average"}, "expected 'mean', 'sum' or 'none', got 'average'"),
    ):
        with pytest.raises(ValueError, match=message):
            cross_entropy(wrong, of, comm, num_classes=4, **more)


@pytest.mark.ranks(2)
def test_no_row_counts(comm: Communicator) -> None:
    loss = cross_entropy(torch.zeros(3, 2), torch.full((3,), -100), comm, num_classes=4)
    assert loss.isnan()
