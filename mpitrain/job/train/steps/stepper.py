"""The optimizer's steps. All ranks skip a step if its loss or gradients are not finite."""

import math
from typing import Any

import torch
from torch import nn

from mpitrain.job.config import Config
from mpitrain.models.loss import IGNORED
from mpitrain.sharding import GradScaler, clip_grad_norm_

MIN_LOSS_SCALE = 1e-4
"""30 overflows in a row lead from 65536 to this scale. If gradients still overflow, the run has diverged. The value is fairseq's."""


class Stepper:
    """Takes an optimizer's steps, with the loss scaled where gradients are in fp16.

    All decisions follow from numbers that all ranks have: the loss of the global batch and the norm of the whole gradient. Overflows
    of scaled gradients are normal, because they adapt the scale. They are an error only if the scale becomes too small. Any other loss
    or gradient that is not finite is an error, unless `train.max_skipped_steps` allows some in a row.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, config: Config) -> None:
        self._model, self._optimizer = model, optimizer
        self._clip_norm = config.optim.clip_norm or math.inf
        self._max_skipped = config.train.max_skipped_steps
        uses_fp16 = "float16" in (config.parallel.param_dtype, config.parallel.reduce_dtype)
        self._scaler = GradScaler(model) if uses_fp16 else None
        self.num_skipped = 0
        """Steps skipped so far."""
        self._in_a_row = 0  # skipped steps in a row, without overflows of scaled gradients

    @property
    def loss_scale(self) -> float | None:
        """The factor of the next loss; None if the loss is not scaled."""
        return None if self._scaler is None else self._scaler.value

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss for `backward`: multiplied by the loss scale if there is one."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def clip(self) -> float:
        """Divide the gradients by the loss scale, then clip them; returns their norm before the clipping. Collective."""
        if self._scaler is not None:
            self._scaler.unscale_()
        return clip_grad_norm_(self._model, self._clip_norm).item()

    def step(self, loss: float, grad_norm: float, *, number: int, is_empty: bool = False, skip: bool = False) -> bool:
        """Take step `number`, or skip it; returns whether it was taken. All arguments are the same on all ranks.

        `is_empty`: no target of the global batch counts. The loss, a mean over nothing, is NaN, and the step counts as one that is not
        finite. `skip`: leave the step out although it is finite. FloatingPointError, before the optimizer steps, if too many steps were
        skipped that were not finite.
        """
        if skip:
            self.num_skipped += 1
            if self._scaler is not None:
                self._scaler.update()  # nothing overflowed
            return False
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self._in_a_row = 0
            if self._scaler is None:
                self._optimizer.step()
            else:
                self._scaler.step(self._optimizer)
                self._scaler.update()
            return True
        said = f"step {number}: loss {loss}, gradient norm {grad_norm}"
        remedy = "Go on from the last checkpoint with a lower optim.lr or optim.clip_norm"
        if is_empty:
            said = f"step {number}: no target of the global batch counts (all are {IGNORED}), so the step has no loss"
            remedy = "Take data with targets in each batch, or a larger train.batch"
        if self._scaler is not None and math.isfinite(loss):
            if self._scaler.value < MIN_LOSS_SCALE:
                raise FloatingPointError(
                    f"{said} in float16, even with the loss scaled by {self._scaler.value:.2g}; no step was taken. "
                    f"{remedy}, or in bfloat16"
                )
        elif self._in_a_row < self._max_skipped:
            self._in_a_row += 1
        else:
            many = (
                f", after {self._in_a_row} skipped steps of this kind (train.max_skipped_steps)"
                if self._in_a_row
                else ""
            )
            raise FloatingPointError(f"{said}{many}; no step was taken. {remedy}")
        if self._scaler is not None:
            if is_empty:
                self._scaler.update()  # the gradients are zeros: nothing overflowed
            else:
                self._scaler.skip()
        self.num_skipped += 1
        return False

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, the same on all ranks, for the `meta` of a checkpoint. Empty if no loss is scaled and no step was skipped."""
        state: dict[str, Any] = {}
        if self.num_skipped:
            state |= {"skipped": self.num_skipped, "skipped_in_a_row": self._in_a_row}
        if self._scaler is not None:
            state["scaler"] = self._scaler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`, perhaps in a run with other dtypes."""
        self.num_skipped, self._in_a_row = state.get("skipped", 0), state.get("skipped_in_a_row", 0)
        if self._scaler is not None and "scaler" in state:
            self._scaler.load_state_dict(state["scaler"])
