"""An exponential moving average of a model's weights, with the same sharding."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from mpitrain.sharding.swapping import swap_values


class EMA:
    """The average of this rank's shards: `average = decay * average + (1 - decay) * weights` at each `update()`.

    The average is of parameters that require gradients, in the dtype of the shards. Of shards in bf16 or fp16 it is in fp32, because
    the small changes of a slow average would be rounded away. It needs as much memory as shards of its dtype, and no communication
    (Polyak and Juditsky 1992). Most generative models use such an average for evaluation. Buffers are not averaged.

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
        self.tensors: dict[str, torch.Tensor] = {
            name: param.detach().to(torch.promote_types(param.dtype, torch.float32), copy=True)
            for name, param in self._params.items()
        }
        """The average, by the parameters' names. Within `swapped` a tensor in the dtype of its shard has the weights instead."""
        self._is_swapped = False

    @torch.no_grad()
    def update(self) -> None:
        """Add the current weights to the average. Call it after the optimizer's step, outside of forward and backward.

        RuntimeError within `swapped`.
        """
        self.check_apart()
        pairs = [(average, self._params[name]) for name, average in self.tensors.items()]
        alike = [(average, param) for average, param in pairs if average.dtype == param.dtype]
        if alike:
            torch._foreach_lerp_([average for average, _ in alike], [param for _, param in alike], 1 - self.decay)
        for average, param in pairs:  # one by one, for the memory of the converted weights
            if average.dtype != param.dtype:
                average.lerp_(param.to(average.dtype), 1 - self.decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """In the block the model has the averaged weights. All ranks enter the block together. Do not train in it.

        A save in it, without `ema`, has the average as the model. RuntimeError within another such block.
        """
        self.check_apart()
        # Copies of averages in another dtype, else the averages themselves, which then need no further memory.
        shown = {name: average.to(self._params[name].dtype) for name, average in self.tensors.items()}
        swap_values(self._params, shown)
        self._is_swapped = True
        try:
            yield
        finally:
            swap_values(self._params, shown)
            self._is_swapped = False

    def check_apart(self) -> None:
        """RuntimeError within `swapped`, where neither the model nor `tensors` has what a reader expects."""
        if self._is_swapped:
            raise RuntimeError(
                "the model has its averaged weights, within ema.swapped(); expected a call after the block. To save the average as the "
                "model, call mpitrain.save in the block without ema="
            )
