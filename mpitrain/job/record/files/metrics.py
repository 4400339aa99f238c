"""The figures of one step, as rank 0 measured them: a line of `metrics.jsonl`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PARTS = {
    "data_s": "data",
    "forward_s": "forward",
    "backward_s": "backward",
    "optimizer_s": "optimizer",
    "comm_s": "communication",
    "check_s": "checks",
}
"""The parts of a step by their figures, in words. `step_s` is the sum of them and of a rest."""

REPRODUCIBLE = ("loss", "grad_norm", "lr", "loss_scale", "padding", "skipped")
"""Figures that settings and data alone decide. The others measure time or memory, but for `step`."""


@dataclass(frozen=True)
class StepMetrics:
    """One step. `metrics.jsonl` has these names, and those of `more`. Seconds are rank 0's."""

    step: int
    time: float
    """The end of the step: seconds since 1970, UTC."""
    loss: float
    """Nats per token, mean over the global batch."""
    lr: float
    grad_norm: float
    """Before the clipping."""
    tokens_per_s: float
    """Of all ranks."""
    step_s: float
    data_s: float
    forward_s: float
    """Without communication, like the next two."""
    backward_s: float
    optimizer_s: float
    comm_s: float
    """In communication, including the wait for other ranks, while nothing was computed."""
    comm_hidden_s: float
    """Communication while the rank computed."""
    memory_bytes: int
    """The resident set with shared pages; on a GPU torch's peak."""
    mfu: float
    """Share of the FLOP/s that a large matrix product reached on the same ranks at the start."""
    mfu_vendor: float | None = None
    """Share of the FLOP/s of the data sheet; None if it is not known."""
    check_s: float | None = None
    """In the checks of this step, including waits for other ranks."""
    loss_scale: float | None = None
    """Factor of the loss; None without scaling: see `GradScaler`."""
    padding: float | None = None
    """Share of the tokens that only fill rows up; None unless documents stay whole."""
    skipped: bool = False
    """The optimizer did not step: loss or gradients are not finite, or a spike."""
    more: Mapping[str, float] = field(default_factory=dict)
    """Figures of layers and data sources, and those of `mpitrain.log`."""

    def to_dict(self) -> dict[str, Any]:
        """The fields of the line, without fields that do not apply."""
        own = {name: value for name, value in vars(self).items() if value is not None and value is not False}
        return own | own.pop("more")
