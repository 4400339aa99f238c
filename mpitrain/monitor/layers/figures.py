"""Figures of each layer on requested steps: norms of gradients and parameters, update ratios, shares of zeros; the logits' entropy.

A layer is "embedding" (what comes before the blocks), "blocks.N", or "head" (the norm and the products after the blocks). Tied weights
belong to the embedding. The figures are those of the whole layer in the plain model, whatever the layout: each rank adds up its own
elements of each layer, elements that several ranks hold count once, and one small message adds up the ranks.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

import torch

from mpitrain.models import LanguageModel
from mpitrain.models.loss import IGNORED, observed
from mpitrain.optim.norms import norms_of_each
from mpitrain.optim.spread import counts_in_norms
from mpitrain.sharding.unit.registry import params_by_shard
from mpitrain.tensor.layers import VocabularyCrossEntropy
from mpitrain.tensor.vocabulary import entropy


class _Sums(NamedTuple):
    """Of one layer, over the elements that this rank counts, then over all ranks."""

    squared_grads: float
    zeros: float
    grads: float
    squared_params: float
    squared_updates: float


class LayerFigures:
    """The figures of a model that `fully_shard` has sharded (any stage).

    A requested step calls all methods in order, on all ranks. On other steps `begin` returns False, and nothing else happens: no hook
    and no copy is there.

    Args:
        model: of a family of `mpitrain.models`.
        every: steps between requested ones; 0: none is.
        total: sums numbers over all ranks.
    """

    def __init__(self, model: LanguageModel, *, every: int, total: Callable[..., list[float]]) -> None:
        self._model, self._every, self._total = model, every, total
        self.layers = ["embedding", *(f"blocks.{index}" for index in range(model.config.layers)), "head"]
        self._entropy = [0.0, 0.0]  # the sum over targets that count, and their number
        self._counted: list[tuple[str, torch.Tensor]] = []
        self._of_grads: list[tuple[float, float, float]] = []
        self._before: list[torch.Tensor] = []
        self._observing = ExitStack()

    def begin(self, step: int) -> bool:
        """Begin step number `step` (1, 2, ...), before its first forward; returns whether figures of it are requested."""
        self._give_up()
        if not self._every or step % self._every:
            return False
        self._observing.enter_context(observed(self._model, self._see))
        return True

    @torch.no_grad()
    def after_backward(self, loss_scale: float | None) -> None:
        """Take the figures of the gradients when they are reduced, before they are divided by `loss_scale` and clipped.

        Keeps a copy of this rank's shards of the parameters until `end`. The optimizer's own tensors would tell the update only for
        optimizers that are known, and without the decay. The memory of the activations is free at this time, so the copy seldom
        raises the peak of a step.
        """
        self._observing.close()
        self._counted = _counted(self._model)
        params = [param for _, param in self._counted]
        grads = [param.new_zeros(0) if param.grad is None else param.grad for param in params]
        scale = loss_scale or 1.0
        self._of_grads = [
            ((norm / scale) ** 2, zeros, grad.numel())
            for norm, zeros, grad in zip(norms_of_each(grads), _zeros_of_each(grads), grads, strict=True)
        ]
        self._before = [param.detach().clone() for param in params]

    @torch.no_grad()
    def end(self) -> dict[str, float]:
        """The figures, after the optimizer's step, or without one; the same on all ranks. Collective.

        Norms of gradients are those before clipping, and norms of parameters are those before the update. A figure that is not defined
        is left out: the share of zeros without gradients, and the update ratio of a layer of zeros.
        """
        norms = norms_of_each(self._before)
        if self._before:
            torch._foreach_sub_(self._before, [param.detach() for _, param in self._counted])
        updates = norms_of_each(self._before)
        own = {layer: _Sums(0, 0, 0, 0, 0) for layer in self.layers}
        for (name, _), of_grad, norm, update in zip(self._counted, self._of_grads, norms, updates, strict=True):
            layer = self._model.stage_plan.layer_of(name)
            more = (*of_grad, norm * norm, update * update)
            own[layer] = _Sums(*(a + b for a, b in zip(own[layer], more, strict=True)))
        # All ranks that see logits, of `tp` too, add both the sum and the number.
        *sums, of_logits, num = self._total(*(value for each in own.values() for value in each), *self._entropy)
        self._give_up()
        width = len(_Sums._fields)
        figures: dict[str, float] = {}
        for index, layer in enumerate(self.layers):
            figures |= _figures(layer, _Sums(*sums[index * width : (index + 1) * width]))
        return figures | ({"logit_entropy": of_logits / num} if num else {})

    def _see(self, logits: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor) -> None:
        loss = self._model.loss
        exchange = loss.ranks.exchange if isinstance(loss, VocabularyCrossEntropy) else None
        counts = targets != IGNORED
        self._entropy[0] += entropy(logits, exchange)[counts].sum(dtype=torch.float64).item()
        self._entropy[1] += counts.sum().item()

    def _give_up(self) -> None:
        """Forget a step, which an error may have ended early."""
        self._observing.close()
        self._entropy, self._counted, self._of_grads, self._before = [0.0, 0.0], [], [], []


def _counted(model: LanguageModel) -> list[tuple[str, torch.Tensor]]:
    """The trained shards of which this rank counts the elements: of ranks with the same elements only the first does."""
    sharded = params_by_shard(model)
    return [
        (name, param)
        for name, param in model.named_parameters()
        if param.requires_grad and counts_in_norms(param) and sharded[param].ranks.replicate.rank == 0
    ]


def _zeros_of_each(grads: list[torch.Tensor]) -> list[float]:
    """The number of zeros in each gradient. The host waits once for each device."""
    zeros = [0.0] * len(grads)
    for device in {grad.device for grad in grads}:
        there = [index for index, grad in enumerate(grads) if grad.device == device]
        found = torch.stack([torch.count_nonzero(grads[index]) for index in there]).tolist()
        for index, num in zip(there, found, strict=True):
            zeros[index] = grads[index].numel() - num
    return zeros


def _figures(layer: str, sums: _Sums) -> dict[str, float]:
    figures = {f"param_norm/{layer}": math.sqrt(sums.squared_params)}
    if sums.grads:
        figures[f"grad_norm/{layer}"] = math.sqrt(sums.squared_grads)
        figures[f"zeros/{layer}"] = sums.zeros / sums.grads
    if sums.squared_params:
        figures[f"update_ratio/{layer}"] = math.sqrt(sums.squared_updates / sums.squared_params)
    return figures
