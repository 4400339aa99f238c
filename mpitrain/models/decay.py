"""Which parameters weight decay touches."""

from __future__ import annotations

from typing import Any

from torch import nn


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups for a torch optimizer: matrices with weight decay, norms and biases without.

    Goes by the number of dimensions alone, which a shard keeps, so it holds before and after sharding. Frozen parameters
    are left out. There are always two groups, in this order, either may be empty: the same number on every rank.

    Args:
        model: any module.
        weight_decay: that of the first group.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
