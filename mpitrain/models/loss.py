"""The loss of a language model: the cross-entropy of the next token in nats, over the targets that count.

A model keeps `make_loss()` as its attribute `loss`, calls `loss_of` in its forward, and has the entry `"loss": Style("loss")` in its
tensor plan: `tensor_parallel` then lets the module compute with this rank's classes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

IGNORED = -100
"""The target of a position that does not count, as in torch and transformers."""

Reduction = Literal["mean", "sum"]
"""The loss of a forward: the mean over the targets that count, or the sum."""

Observer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
"""Gets the logits (N, V) in float32, the targets (N,) and the losses (N,) of a forward, all without gradients; ignored targets have the
loss 0. It must not write to them. V: all classes, or this rank's."""


class TokenLoss(nn.CrossEntropyLoss):
    """The sum of the cross-entropies, made of the two operations of which torch makes it: the same bits.

    Between the two the loss of each token is at hand, so that `observers` get it almost for nothing.
    """

    def __init__(self) -> None:
        super().__init__(ignore_index=IGNORED, reduction="sum")
        self.observers: list[Observer] = []

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """(N, V), (N,) int64 -> the loss, a scalar."""
        log_probs = F.log_softmax(input, 1)
        if self.observers:
            losses = F.nll_loss(log_probs.detach(), target, ignore_index=self.ignore_index, reduction="none")
            for observe in self.observers:
                observe(input.detach(), target, losses)
        return F.nll_loss(log_probs, target, ignore_index=self.ignore_index, reduction=self.reduction)


def make_loss() -> TokenLoss:
    """The module for `loss_of`."""
    return TokenLoss()


@contextmanager
def observed(model: nn.Module, observer: Observer) -> Iterator[None]:
    """In the block, `observer` sees each forward of the model with targets, in their order. No effect in a stage without the loss."""
    loss = getattr(model, "loss", None)
    if loss is None:
        yield
        return
    loss.observers.append(observer)
    try:
        yield
    finally:
        loss.observers.remove(observer)


def loss_of(
    loss: nn.CrossEntropyLoss,
    logits_BLV: torch.Tensor,  # noqa: N803
    targets_BL: torch.Tensor,  # noqa: N803
    reduction: Reduction,
) -> torch.Tensor:
    """The sum, or the mean, of the losses: a float32 scalar. The mean is NaN if no target counts.

    logits_BLV: (B, L, V) floating-point; V: all classes, or this rank's. targets_BL: (B, L) int64. ValueError for another reduction.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction: expected 'mean' or 'sum', got {reduction!r}")
    total: torch.Tensor = loss(logits_BLV.float().flatten(0, 1), targets_BL.flatten())
    return total if reduction == "sum" else total / num_counted(targets_BL)


def num_counted(targets: torch.Tensor) -> torch.Tensor:
    """The number of targets that count: an int64 scalar."""
    return (targets != IGNORED).sum()
