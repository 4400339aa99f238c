"""What a rank does in a traced step, by name: the phases of the step, and the forwards and backwards of the model's layers."""

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from mpitrain.job.record.gauges.phases import Lap, StepClock
from mpitrain.job.record.layer_ranges import Kind, layer_ranges

if TYPE_CHECKING:
    from torch import nn


class Span(NamedTuple):
    """A named time of this rank, from `begun` to `ended` in seconds of `time.monotonic`."""

    name: str
    begun: float
    ended: float


class Spans:
    """The spans of a rank, from the construction to `close`. The hooks read the clock, and change no tensor.

    `clock`: of the trainer's steps; on Linux its time is that of `time.monotonic`. `has_stages`: the actions of a pipeline stand for
    the forwards and backwards of the whole model.
    """

    def __init__(self, model: "nn.Module", clock: StepClock, *, has_stages: bool) -> None:
        self.layers: list[Span] = []
        self.phases: list[Span] = []
        self._clock, self._has_stages, self._begun = clock, has_stages, 0.0
        self._hooks = ExitStack()
        self._hooks.enter_context(layer_ranges(model, self._enter, self._leave))
        clock.on_lap = self._lap

    def close(self) -> None:
        """Remove the hooks."""
        self._hooks.close()
        self._clock.on_lap = None

    def _enter(self, layer: str, kind: Kind) -> None:
        self._begun = time.monotonic()

    def _leave(self, layer: str, kind: Kind) -> None:
        self.layers.append(Span(f"{kind} {layer}", self._begun, time.monotonic()))

    def _lap(self, lap: Lap) -> None:
        if not (self._has_stages and lap.phase in ("forward", "backward")):
            self.phases.append(Span(*lap))
