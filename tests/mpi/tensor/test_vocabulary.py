"""The cross-entropy of logits whose classes are cut is torch's, with all its options."""

import copy
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import mpitrain
from collectives import Communicator
from mpitrain.placement.parts import bounds, part_of
from mpitrain.tensor import Style, cross_entropy, vocabulary
from mpitrain.tensor.exchange import Exchange


@pytest.mark.ranks(2)
def test_float64(comm: Communicator) -> None:
    whole = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    begin, end = bounds(8, comm.size)[comm.rank : comm.rank + 2]
    found = cross_entropy(whole[:, begin:end], torch.arange(5), comm, num_classes=8)
    torch.testing.assert_close(found, F.cross_entropy(whole, torch.arange(5)), rtol=1e-14, atol=0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("offset", [0.0, 7.0, 60.0, -250.0, 1e4])
def test_the_digits_of_the_loss(comm: Communicator, offset: float, smoothing: float) -> None:
    """A loss in float32 has as many as the logits allow, wherever these are: torch's in float64 is the right one."""
    generator = torch.Generator().manual_seed(0)
    logits, targets = 3 * torch.randn(500, 300, generator=generator) + offset, torch.arange(500) % 300
    whole = logits.double().requires_grad_()
    begin, end = bounds(300, comm.size)[comm.rank : comm.rank + 2]
    mine = logits[:, begin:end].clone().requires_grad_()
    expected = F.cross_entropy(whole, targets, reduction="none", label_smoothing=smoothing)
    found = cross_entropy(mine, targets, comm, num_classes=300, reduction="none", label_smoothing=smoothing)
    expected.sum().backward()
    found.sum().backward()
    assert mine.grad is not None and whole.grad is not None
    torch.testing.assert_close(found.double(), expected, rtol=3e-7, atol=3e-7)
    torch.testing.assert_close(mine.grad.double(), whole.grad[:, begin:end], rtol=0, atol=3e-7)


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


def _masked(kind: str, logits: torch.Tensor, edges: list[int]) -> torch.Tensor:
    """Logits with values that masks and large layers make. `edges`: where the ranks' classes begin, and the end."""
    if kind == "one rank":
        logits[:, edges[-2] :] = -torch.inf
    elif kind == "all but one class":
        logits[:, 1:] = -torch.inf
    elif kind == "rows":
        logits[0], logits[1, : edges[1]], logits[2, edges[1] :] = -torch.inf, -torch.inf, -torch.inf
    elif kind == "finite":
        logits[1:3], logits[3, edges[1] :] = torch.finfo(logits.dtype).min, torch.finfo(logits.dtype).min
    elif kind == "far":
        logits += 1000
    elif kind == "NaN":
        logits[0, 0], logits[1, -1] = torch.inf, torch.nan
    return logits


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("targets_that_count", ["all", "some", "none"])
def test_masked_classes_and_targets(comm: Communicator, dtype: torch.dtype, targets_that_count: str) -> None:
    """Losses, gradients and entropies are those of torch, and NaN where torch's are."""
    generator = torch.Generator().manual_seed(0)
    edges = bounds(7, comm.size)
    begin, end = edges[comm.rank : comm.rank + 2]
    exchange = Exchange(comm, by_messages=True)
    of_loss = torch.promote_types(dtype, torch.float32)
    close = {"rtol": 1e-12 if dtype == torch.float64 else 2e-6, "atol": 1e-5 if dtype != torch.float64 else 1e-12}
    kinds = ("plain", "one rank", "all but one class", "rows", "finite", "far", "NaN")
    for kind, reduction, smoothing in product(kinds, ("mean", "sum", "none"), (0.0, 0.1)):
        whole = _masked(kind, torch.randn(5, 7, generator=generator).to(dtype), edges).requires_grad_()
        mine = whole.detach()[:, begin:end].clone().requires_grad_()
        targets = torch.tensor([0, 1, 4, 5, 6])  # of masked classes, too
        targets[{"all": [], "some": [0, 3], "none": [0, 1, 2, 3, 4]}[targets_that_count]] = -100
        options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
        expected = F.cross_entropy(whole.to(of_loss), targets, **options)
        found = cross_entropy(mine, targets, exchange, num_classes=7, **options)
        torch.testing.assert_close(found, expected, equal_nan=True, **close)
        upstream = torch.rand(expected.shape, generator=generator, dtype=of_loss)
        if reduction == "none":
            upstream[targets == -100] = torch.nan  # as of a mean over no rows
        expected.backward(upstream)
        found.backward(upstream)
        assert whole.grad is not None and mine.grad is not None
        # In a short type both gradients are rounded once, from numbers in float32 that differ a little.
        bound = close if dtype == of_loss else {"rtol": 1e-2, "atol": 1e-3}
        torch.testing.assert_close(mine.grad, whole.grad[:, begin:end], equal_nan=True, **bound)
        logs = whole.detach().to(of_loss).log_softmax(1)
        summands = torch.where(logs == -torch.inf, 0, logs * logs.exp())
        entropies = vocabulary.entropy(mine.detach(), exchange)
        torch.testing.assert_close(entropies, -summands.sum(1), equal_nan=True, **close)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_batch_without_targets_leaves_the_weights(comm: Communicator, dtype: torch.dtype) -> None:
    """The mean is NaN, and the gradients are zeros, as in torch: also through the whole model, and in a sum of micro-batches."""
    torch.manual_seed(0)
    plain = nn.ModuleDict({"head": nn.Linear(4, 7), "loss": nn.CrossEntropyLoss(label_smoothing=0.1)}).to(dtype)
    cut = mpitrain.tensor_parallel(copy.deepcopy(plain), comm, {"head": Style("column"), "loss": Style("loss")})
    for count in (False, True):
        for model in (plain, cut):
            targets = torch.arange(3) if count else torch.full((3,), -100)
            loss = model["loss"](model["head"](torch.ones(3, 4, dtype=dtype)), targets)  # type: ignore[index]
            assert loss.isnan() != count
            loss.backward()
        for whole, mine in zip(plain.parameters(), cut.parameters(), strict=True):
            part = part_of(mine)
            assert part is not None and whole.grad is not None and mine.grad is not None
            bound = {"rtol": 1e-12, "atol": 1e-15} if dtype == torch.float64 else {"rtol": 2e-2, "atol": 1e-3}
            torch.testing.assert_close(mine.grad, part.take(whole.grad), **bound)
