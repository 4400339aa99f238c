"""Loss scaling for fp16, and steps that are skipped on all ranks alike where a gradient is not finite."""

from typing import Any

import torch
from torch import nn

from mpitrain.sharding.clip import gradients
from mpitrain.sharding.module import sharded_over


class GradScaler:
    """As torch's `torch.amp.GradScaler`, for a sharded model: an overflow on any rank is one on all.

        scaler = mpitrain.GradScaler(model)
        scaler.scale(loss).backward()
        scaler.unscale_()  # only if gradients are looked at, or clipped, before the step
        scaler.step(optimizer)

    The loss is multiplied by `scale` so that small gradients do not vanish in fp16, the gradients are divided by it before the step
    (Micikevicius et al., "Mixed precision training", ICLR 2018). A step with a gradient that is not finite is left out on all ranks and
    divides the scale by `backoff`; `interval` steps without one multiply it by `growth`. `scale=1, growth=1, backoff=1`: only skips.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        scale: float = 65536.0,
        growth: float = 2.0,
        backoff: float = 2.0,
        interval: int = 2000,
    ) -> None:
        if not (scale > 0 and growth >= 1 and backoff >= 1 and interval >= 1):
            raise ValueError(
                f"GradScaler: scale {scale}, growth {growth}, backoff {backoff}, interval {interval}; expected a scale above 0, "
                "the others at least 1"
            )
        self._model = model
        self._growth, self._backoff, self._interval = growth, backoff, interval
        self.value = float(scale)
        """The scale of the next loss."""
        self.num_skipped = 0
        """Steps left out so far."""
        self._num_good = 0  # since the scale has changed
        self._is_finite: bool | None = None  # of the gradients, once they are unscaled

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scale."""
        return loss * self.value

    @torch.no_grad()
    def unscale_(self) -> bool:
        """Divide all gradients by the scale, once a step; returns whether all are finite on all ranks. Collective."""
        if self._is_finite is None:
            grads = gradients(self._model)
            if self.value != 1:
                for grad in grads:
                    grad.div_(self.value)
            wrong = torch.tensor([not all(bool(grad.isfinite().all()) for grad in grads)])
            over = sharded_over(self._model)
            if over is not None:
                over.all.all_reduce(wrong, "max")
            self._is_finite = not wrong.item()
        return self._is_finite

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step the optimizer unless a gradient on any rank is not finite, and adapt the scale; returns whether it did. Collective."""
        if not self.unscale_():
            self.skip()
            return False
        self._is_finite = None
        optimizer.step()
        self._num_good += 1
        if self._num_good == self._interval:
            self.value, self._num_good = self.value * self._growth, 0
        return True

    def skip(self) -> None:
        """Leave this step out whatever its gradients are, as if one had overflowed. All ranks alike."""
        self._is_finite = None
        self.num_skipped += 1
        self.value, self._num_good = self.value / self._backoff, 0

    def state_dict(self) -> dict[str, Any]:
        """The scale and its history; plain numbers, the same on all ranks, for the `meta` of a checkpoint."""
        return {"scale": self.value, "good_steps": self._num_good, "skipped_steps": self.num_skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        self.value, self._num_good, self.num_skipped = state["scale"], state["good_steps"], state["skipped_steps"]
