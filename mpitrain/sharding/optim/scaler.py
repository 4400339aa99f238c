"""Loss scaling for fp16. If a gradient is not finite, all ranks skip the step."""

from typing import Any, NamedTuple

import torch
from torch import nn

from mpitrain.optim.norms import all_finite
from mpitrain.placement.marks import everyone_of
from mpitrain.sharding.step.backward import check_reduced
from mpitrain.sharding.unit.unit import compression_of


class _Scale(NamedTuple):
    """The scale and its history."""

    value: float
    num_good: int = 0  # steps since the last change of the scale
    num_skipped: int = 0  # skipped steps since the beginning


class GradScaler:
    """The `torch.amp.GradScaler` for a model that is spread over ranks: an overflow on any rank counts on all ranks.

        scaler = mpitrain.GradScaler(model)
        scaler.scale(loss).backward()
        scaler.unscale_()  # only if the gradients are read or clipped before the step
        scaler.step(optimizer)  # for each optimizer
        scaler.update()

    The loss is multiplied by `scale` so that small gradients do not vanish in fp16, the gradients are divided by it before the step
    (Micikevicius et al., "Mixed precision training", ICLR 2018). If a gradient is not finite, all ranks skip the step, and the scale is
    divided by `backoff`. After `interval` steps with finite gradients the scale is multiplied by `growth`. `scale=1, growth=1,
    backoff=1` only skips steps.

    With several optimizers each gradient is divided once, also if two optimizers have the parameter. An optimizer is skipped if one of
    its own gradients is not finite. All optimizers together count as one step. `update()` is optional: the next scaled loss calls it.
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
                "and at least 1 for the other values"
            )
        self._model = model
        self._growth, self._backoff, self._interval = growth, backoff, interval
        self._now = self._next = _Scale(float(scale))  # the scale of this step's losses, and of the next step's
        # By parameter whose gradient was divided by the scale: whether all gradients of the same check were finite.
        self._unscaled: dict[int, bool] = {}
        self._stepped: set[torch.optim.Optimizer] = set()  # stepped or skipped since the last update

    @property
    def value(self) -> float:
        """The scale of the next loss."""
        return self._next.value

    @value.setter
    def value(self, value: float) -> None:
        """Set the scale between two steps."""
        self._begin(self._next._replace(value=float(value)))

    @property
    def num_skipped(self) -> int:
        """Steps skipped so far."""
        return self._next.num_skipped

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scale."""
        if self._stepped:
            self.update()
        if (compression := compression_of(self._model)) is not None:
            compression.scale = self._now.value
        return loss * self._now.value

    @torch.no_grad()
    def unscale_(self, optimizer: torch.optim.Optimizer | None = None) -> bool:
        """Divide the gradients of the optimizer's parameters (None: of the whole model) by the scale, unless that was done already.

        Returns whether all are finite on all ranks. Collective. RuntimeError if no rank has a gradient, or if some wait to be reduced.
        """
        if optimizer in self._stepped or (optimizer is None and self._stepped):
            self.update()  # a backward has run since the step
        params = self._params(optimizer)
        check_reduced(params, "GradScaler.unscale_")
        new = [param for param in params if id(param) not in self._unscaled]
        if new:
            grads = [param.grad for param in new if param.grad is not None]
            if grads and self._now.value != 1:
                torch._foreach_div_(grads, self._now.value)
            flags = torch.tensor([not all_finite(grads), bool(grads)])
            for comm in everyone_of(self._model.parameters()):
                comm.all_reduce(flags, "max")
            is_wrong, is_any = flags.tolist()
            if not is_any and len(new) == len(params):
                raise RuntimeError(
                    "GradScaler: none of these parameters has a gradient on any rank; call backward first"
                )
            self._unscaled |= dict.fromkeys(map(id, new), not is_wrong)
        return all(self._unscaled[id(param)] for param in params)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step the optimizer unless a gradient of its parameters is not finite on some rank; returns whether it stepped. Collective.

        RuntimeError if its parameters have no gradient on any rank.
        """
        is_finite = self.unscale_(optimizer)
        if is_finite:
            optimizer.step()
        self._stepped.add(optimizer)
        self._next = self._after(all(self._unscaled.values()))
        return is_finite

    @torch.no_grad()
    def update(self) -> None:
        """Adapt the scale; call it after all optimizers have stepped. Without gradients unscaled since the last call: no effect."""
        if self._unscaled:
            self._next = self._after(all(self._unscaled.values()))
        factor = self._next.value / self._now.value
        if factor != 1:
            # Gradients whose optimizer has not stepped yet get the new scale, which the next backward uses for its part.
            for param in self._model.parameters():
                if param.grad is not None and id(param) not in self._unscaled:
                    param.grad.mul_(factor)
        self._begin(self._next)

    def skip(self) -> None:
        """Skip this step as if a gradient had overflowed. All ranks make the same call."""
        self._begin(self._after(False))

    def state_dict(self) -> dict[str, Any]:
        """The scale and its history; plain numbers, the same on all ranks, for the `meta` of a checkpoint."""
        scale = self._next
        return {"scale": scale.value, "good_steps": scale.num_good, "skipped_steps": scale.num_skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self._begin(_Scale(state["scale"], state["good_steps"], state["skipped_steps"]))

    def _params(self, optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
        if optimizer is None:
            return list(self._model.parameters())
        return [param for group in optimizer.param_groups for param in group["params"]]

    def _after(self, is_finite: bool) -> _Scale:
        """The scale after a step with the gradients of this round."""
        value, num_good, num_skipped = self._now
        if not is_finite:
            return _Scale(value / self._backoff, 0, num_skipped + 1)
        if num_good + 1 == self._interval:
            return _Scale(value * self._growth, 0, num_skipped)
        return _Scale(value, num_good + 1, num_skipped)

    def _begin(self, scale: _Scale) -> None:
        """Begin a round: no gradient is unscaled, and no optimizer has stepped."""
        self._now = self._next = scale
        self._unscaled, self._stepped = {}, set()
