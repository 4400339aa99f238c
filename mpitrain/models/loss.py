"""The loss of a language model: the cross-entropy of the next token in nats, over the targets that count.

A model keeps `make_loss()` as its attribute `loss`, calls `loss_of` in its forward, and has the entry `"loss": Style("loss")` in its
tensor plan: `tensor_parallel` then lets the module compute with this rank's classes.
"""

from typing import Literal

import torch
from torch import nn

IGNORED = -100
"""The target of a position that does not count, as in torch and transformers."""

Reduction = Literal["mean", "sum"]
"""The loss of a forward: the mean over the targets that count, or the sum."""


def make_loss() -> nn.CrossEntropyLoss:
    """The module for `loss_of`."""
    return nn.CrossEntropyLoss(ignore_index=IGNORED, reduction="sum")


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
