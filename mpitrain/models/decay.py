"""Groups of parameters for optimizers: with and without weight decay, matrices and others, and with a learning rate for each layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from mpitrain.models.language_model import LanguageModel


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


def muon_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Three parameter groups for `mpitrain.optim.Muon`: matrices for Muon; then, for AdamW, embeddings and heads, and norms and biases.

    Embeddings and heads are the parameters of `nn.Embedding`, of modules named `head` or `lm_head`, and of what a model of transformers
    names as its output embeddings. The groups are the same before and after sharding. Frozen parameters are left out. Every rank has
    three groups in this order; a group may be empty.

    Args:
        model: any module.
        weight_decay: the weight decay of the first two groups.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    tables = {
        param
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) or module is head or name.rpartition(".")[2] in ("head", "lm_head")
        for param in module.parameters()
    }
    decayed, others = decay_groups(model, weight_decay)
    return [
        {"params": [p for p in decayed["params"] if p not in tables], "weight_decay": weight_decay, "use_muon": True},
        {"params": [p for p in decayed["params"] if p in tables], "weight_decay": weight_decay, "use_muon": False},
        {**others, "use_muon": False},
    ]


def layer_groups(model: LanguageModel, groups: Iterable[dict[str, Any]], layer_decay: float) -> list[dict[str, Any]]:
    """Parameter groups divided by layers, with the layer's share of the learning rate as "lr_factor" (Clark et al. 2020).

    The factor is 1 in the head, and in each other layer `layer_decay` times that of the layer above it, down to the embedding. It
    multiplies an "lr_factor" that a group has. Tied weights belong to the embedding. All stages of a pipeline have the same groups, of
    which those of other stages' layers are empty.
    """
    groups = list(groups)
    layers = ["head", *(f"blocks.{index}" for index in reversed(range(model.config.layers))), "embedding"]
    layer_of = {param: model.stage_plan.layer_of(name) for name, param in model.named_parameters()}
    return [
        {
            **group,
            "params": [param for param in group["params"] if layer_of[param] == layer],
            "lr_factor": group.get("lr_factor", 1.0) * layer_decay**depth,
        }
        for depth, layer in enumerate(layers)
        for group in groups
    ]
