"""The parameters with and without weight decay."""

from __future__ import annotations

from typing import Any

from torch import nn


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups for a torch optimizer: matrices with weight decay, norms and biases without.

    The groups depend only on the number of dimensions. A shard keeps this number, so the groups are the same before and after sharding.
    Frozen parameters are left out. Every rank has two groups in this order; a group may be empty.

    Args:
        model: any module.
        weight_decay: the weight decay of the first group.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
