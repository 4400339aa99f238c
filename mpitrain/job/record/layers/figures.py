"""Figures of each layer on requested steps: norms of gradients and parameters, update ratios, shares of zeros; the logits' entropy.

A layer is "embedding" (what comes before the blocks), "blocks.N", or "head" (the norm and the products after the blocks). Tied weights
belong to the embedding. The figures are those of the whole layer in the plain model, whatever the layout: each rank adds up its own
elements of each layer, elements that several ranks hold count once, and one small message adds up the ranks. Sums of squares and of
entropies are exact (optim/exact_sums.py), so with slices the figures have the same bits at any number of ranks.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

    from mpitrain.models import LanguageModel

_NUM_SUMS = 3
"""Sums of squares of a layer: of gradients, parameters and updates. The message has them, then the zeros and all of the gradients."""


class LayerFigures:
    """The figures of a model that `fully_shard` has sharded (any stage).

    A requested step calls all methods in order, on all ranks. On other steps `begin` returns False, and nothing else happens: no hook
    and no copy is there.

    Args:
        model: of a family of `mpitrain.models`.
        every: steps between requested ones; 0: none is.
        total: sums numbers over all ranks.
    """

    def __init__(self, model: "LanguageModel", *, every: int, total: Callable[..., list[float]]) -> None:
        self._model, self._every, self._total = model, every, total
        self.layers = ["embedding", *(f"blocks.{index}" for index in range(model.config.layers)), "head"]
        self._entropies: list[float] = []  # of each forward the sum over targets that count
        self._num_targets = 0.0
        self._counted: list[tuple[str, torch.Tensor]] = []
        self._squared_grads: list[np.ndarray] = []  # of each parameter the sums of blocks
        self._zeros: list[tuple[float, int]] = []  # in the gradient of each parameter, and all elements
        self._scale = 1.0
        self._before: list[torch.Tensor] = []
        self._observing = ExitStack()

    def begin(self, step: int) -> bool:
        """Begin step number `step` (1, 2, ...), before its first forward; returns whether figures of it are requested."""
        self._give_up()
        if not self._every or step % self._every:
            return False
        from mpitrain.models.loss import observed

        self._observing.enter_context(observed(self._model, self._see))
        return True

    def after_backward(self, loss_scale: float | None) -> None:
        """Take the figures of the gradients when they are reduced, before they are divided by `loss_scale` and clipped.

        Keeps a copy of this rank's shards of the parameters until `end`. The optimizer's own tensors would tell the update only for
        optimizers that are known, and without the decay. The memory of the activations is free at this time, so the copy seldom
        raises the peak of a step.
        """
        import torch

        with torch.no_grad():
            self._observing.close()
            self._counted = _counted(self._model)
            params = [param for _, param in self._counted]
            grads = [param.new_zeros(0) if param.grad is None else param.grad for param in params]
            self._scale = loss_scale or 1.0
            self._squared_grads = self._squares(grads)
            self._zeros = [(zeros, grad.numel()) for zeros, grad in zip(_zeros_of_each(grads), grads, strict=True)]
            self._before = [param.detach().clone() for param in params]

    def end(self) -> dict[str, float]:
        """The figures, after the optimizer's step, or without one; the same on all ranks. Collective.

        Norms of gradients are those before clipping, and norms of parameters are those before the update. A figure that is not defined
        is left out: the share of zeros without gradients, and the update ratio of a layer of zeros.
        """
        import torch

        from mpitrain.optim.exact_sums import SLOTS, to_digits, to_float

        with torch.no_grad():
            params = self._squares(self._before)
            if self._before:
                torch._foreach_sub_(self._before, [param.detach() for _, param in self._counted])
            updates = self._squares(self._before)
        kinds = self._squared_grads, params, updates
        of_layers: dict[str, list[int]] = {layer: [] for layer in self.layers}
        for index, (name, _) in enumerate(self._counted):
            of_layers[self._model.stage_plan.layer_of(name)].append(index)
        own: list[float] = []
        for its in of_layers.values():
            for kind in kinds:
                own += to_digits(np.concatenate([np.empty(0), *(kind[index] for index in its)])).tolist()
            own += [sum(self._zeros[index][0] for index in its), sum(self._zeros[index][1] for index in its)]
        # All ranks that see logits, of `tp` too, add both the sum and the number.
        own += [*to_digits(np.array(self._entropies)).tolist(), self._num_targets]
        total = iter(self._total(*own))
        scale = self._scale
        self._give_up()
        figures: dict[str, float] = {}
        for layer in self.layers:
            sums = [to_float(list(islice(total, SLOTS))) for _ in range(_NUM_SUMS)]
            figures |= _figures(layer, sums[0] / scale**2, *sums[1:], *islice(total, 2))
        of_logits, num = to_float(list(islice(total, SLOTS))), next(total)
        return figures | ({"logit_entropy": of_logits / num} if num else {})

    def _squares(self, tensors: "list[torch.Tensor]") -> list[np.ndarray]:
        """The sums of squares of blocks of tensors that are like the parameters that count."""
        from mpitrain.optim.exact_sums import block_sums
        from mpitrain.placement.marks import rows_of

        return block_sums([rows_of(param, each) for (_, param), each in zip(self._counted, tensors, strict=True)])

    def _see(self, logits: "torch.Tensor", targets: "torch.Tensor", losses: "torch.Tensor") -> None:
        import torch

        from mpitrain.models.loss import IGNORED
        from mpitrain.tensor.layers import VocabularyCrossEntropy
        from mpitrain.tensor.vocabulary import entropy

        loss = self._model.loss
        exchange = loss.ranks.exchange if isinstance(loss, VocabularyCrossEntropy) else None
        counts = targets != IGNORED
        found = entropy(logits, exchange)[counts].sum(dtype=torch.float64).item()
        self._entropies.append(0.0 if found < 0 else found)  # rounding may make it negative
        self._num_targets += counts.sum().item()

    def _give_up(self) -> None:
        """Forget a step, which an error may have ended early."""
        self._observing.close()
        self._entropies, self._num_targets, self._scale = [], 0.0, 1.0
        self._counted, self._squared_grads, self._zeros, self._before = [], [], [], []


def _counted(model: "LanguageModel") -> "list[tuple[str, torch.Tensor]]":
    """The trained shards of which this rank counts the elements: of ranks with the same elements only the first does."""
    from mpitrain.placement.marks import counts_in_norms
    from mpitrain.sharding.unit.unit import params_by_shard

    sharded = params_by_shard(model)
    return [
        (name, param)
        for name, param in model.named_parameters()
        if param.requires_grad and counts_in_norms(param) and sharded[param].ranks.replicate.rank == 0
    ]


def _zeros_of_each(grads: "list[torch.Tensor]") -> list[float]:
    """The number of zeros in each gradient. The host waits once for each device."""
    import torch

    zeros = [0.0] * len(grads)
    for device in {grad.device for grad in grads}:
        there = [index for index, grad in enumerate(grads) if grad.device == device]
        found = torch.stack([torch.count_nonzero(grads[index]) for index in there]).tolist()
        for index, num in zip(there, found, strict=True):
            zeros[index] = grads[index].numel() - num
    return zeros


def _figures(
    layer: str, squared_grads: float, squared_params: float, squared_updates: float, zeros: float, num_grads: float
) -> dict[str, float]:
    figures = {f"param_norm/{layer}": math.sqrt(squared_params)}
    if num_grads:
        figures[f"grad_norm/{layer}"] = math.sqrt(squared_grads)
        figures[f"zeros/{layer}"] = zeros / num_grads
    if squared_params:
        figures[f"update_ratio/{layer}"] = math.sqrt(squared_updates / squared_params)
    return figures
