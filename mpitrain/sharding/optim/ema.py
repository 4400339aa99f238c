"""An exponential moving average of a model's weights, with the same sharding."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from mpitrain.sharding.swapping import swap_values


class EMA:
    """The average of this rank's shards: `average = decay * average + (1 - decay) * weights` at each `update()`.

    The average is of parameters that require gradients, in the dtype of the shards. It needs as much memory as the shards, and no
    communication (Polyak and Juditsky 1992). Most generative models use such an average for evaluation.

        ema = mpitrain.EMA(model, 0.999)
        optimizer.step(); ema.update()
        with ema.swapped():
            evaluate(model)
        mpitrain.save(path, model, optimizer, ema=ema)  # and load(..., ema=ema), on any number of ranks
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"EMA: decay {decay}; expected at least 0 and less than 1")
        self.decay = decay
        self._params = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self.tensors: dict[str, torch.Tensor] = {name: param.detach().clone() for name, param in self._params.items()}
        """The average, by the parameters' names."""

    @torch.no_grad()
    def update(self) -> None:
        """Add the current weights to the average. Call it after the optimizer's step, outside of forward and backward."""
        torch._foreach_lerp_(list(self.tensors.values()), list(self._params.values()), 1 - self.decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """In the block the model has the averaged weights. All ranks enter the block together. Do not train in it."""
        swap_values(self._params, self.tensors)
        try:
            yield
        finally:
            swap_values(self._params, self.tensors)
