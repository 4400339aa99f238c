"""The forwards and backwards of the main job, of one model on each rank or of the stages of a pipeline; its time in communication."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice, pairwise
from typing import Any, Protocol

import torch
from torch import nn

from mpitrain.job.record.gauges.phases import StepClock
from mpitrain.job.train.batches.micro_batch import MicroBatch
from mpitrain.models import LanguageModel
from mpitrain.optim.norms import NormTime
from mpitrain.plans.draws import seed_all
from mpitrain.sharding.module import steps_of
from mpitrain.sharding.unit.unit import compression_of, diloco_of
from mpitrain.stages import Pipeline
from mpitrain.tensor.layers import exchanges_of

Scale = Callable[[torch.Tensor], torch.Tensor]
"""From the loss of a micro-batch to the value whose gradient is computed."""


_EVALUATED = 64  # micro-batches in one pass of a pipeline


class Passes(Protocol):
    """The passes of a model. All methods are collective, and return the same on all ranks that hold one copy of the model."""

    def train(self, batches: Sequence[MicroBatch], scale: Scale, clock: StepClock) -> torch.Tensor:
        """Forward and backward of each micro-batch; returns the sum over its targets of the losses of each, on the host.

        Its time goes into the clock.
        """

    def evaluate(self, batches: Iterable[MicroBatch]) -> list[float]:
        """The sum over its targets of the losses of each batch, without gradients."""

    def last_logits(self, tokens_BL: torch.Tensor) -> torch.Tensor:  # noqa: N803
        """(B, L) int64 -> (B, 1, V): the logits after the last token, without gradients."""

    def communication_s(self) -> float:
        """Seconds that this rank has spent in messages of the passes, with the waits for other ranks."""

    def actions(self) -> list[tuple[str, float, float]] | None:
        """The name, begin and end of each action of the last step on this rank, in seconds of time.perf_counter; None: no pipeline."""

    def report(self) -> tuple[str, str] | None:
        """A line about the last steps, and a picture of them as SVG; None if there is nothing to tell."""


class DeviceShares:
    """The share of forwards in the time of a device, which runs later than the host starts its work.

    event: makes a `torch.cuda.Event(enable_timing=True)` or the like.
    """

    def __init__(self, event: Callable[[], Any]) -> None:
        self._event, self._marks = event, list[Any]()

    def mark(self) -> None:
        """To be called at the beginning, and after each forward and each backward, which take turns."""
        self._marks.append(self._event())
        self._marks[-1].record()

    def forward(self) -> float:
        """The share, when the device has done the work."""
        spans = [one.elapsed_time(other) for one, other in pairwise(self._marks)]
        return sum(spans[::2]) / (sum(spans) or 1.0)


class WholePasses:
    """The passes of a model that each rank computes from the first block to the last."""

    def __init__(self, model: LanguageModel, device: torch.device) -> None:
        self._model, self._device = model, device

    def train(self, batches: Sequence[MicroBatch], scale: Scale, clock: StepClock) -> torch.Tensor:
        # The gradients of a step are compressed once. Without compression the micro-batches' reductions need less memory.
        no_sync: Any = getattr(self._model, "no_sync", nullcontext)
        waits = compression_of(self._model) is not None
        losses = []
        before, shares = clock.seconds["forward"] + clock.seconds["backward"], None
        if self._device.type == "cuda":
            shares = DeviceShares(partial(torch.cuda.Event, enable_timing=True))
            shares.mark()
        for number, batch in enumerate(batches, 1):
            if batch.seed is not None:
                seed_all(*batch.seed)
            loss = self._loss(batch)
            clock.lap("forward")
            if shares is not None:
                shares.mark()
            with no_sync() if waits and number < len(batches) else nullcontext():
                scale(loss).backward()
            losses.append(loss.detach())
            clock.lap("backward")
            if shares is not None:
                shares.mark()
        found = torch.stack(losses).cpu()  # waits for a GPU
        clock.lap("backward")
        if shares is not None:
            both = clock.seconds["forward"] + clock.seconds["backward"] - before
            clock.move(clock.seconds["forward"] - shares.forward() * both, "forward", "backward")
        return found

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch]) -> list[float]:
        return [self._loss(batch).item() for batch in batches]

    @torch.no_grad()
    def last_logits(self, tokens_BL: torch.Tensor) -> torch.Tensor:  # noqa: N803
        return self._model(tokens_BL)[:, -1:]

    def communication_s(self) -> float:
        return 0.0

    def actions(self) -> None:
        return None

    def report(self) -> None:
        return None

    def _loss(self, batch: MicroBatch) -> torch.Tensor:
        there = batch.to(self._device)
        return self._model(there.tokens, there.targets, reduction="sum", segments=there.segments)


class StagedPasses:
    """The passes of a pipeline."""

    def __init__(self, pipe: Pipeline, device: torch.device) -> None:
        self.pipe, self._device = pipe, device

    def train(self, batches: Sequence[MicroBatch], scale: Scale, clock: StepClock) -> torch.Tensor:
        inputs, last = self._given(batches)
        before = clock.seconds["backward"]
        seeds = [batch.seed for batch in batches if batch.seed is not None]
        losses = self.pipe.step(inputs, last=last, scale=scale, seeds=seeds or None)
        clock.lap("backward")
        # Forwards and backwards take turns, so the pipeline's own record divides the time.
        clock.move(self.pipe.forward_share() * (clock.seconds["backward"] - before), "backward", "forward")
        return losses

    def evaluate(self, batches: Iterable[MicroBatch]) -> list[float]:
        losses, left = list[float](), iter(batches)
        while group := list(islice(left, _EVALUATED)):
            inputs, last = self._given(group)
            losses += self.pipe.evaluate(inputs, last=last).tolist()
        return losses

    def last_logits(self, tokens_BL: torch.Tensor) -> torch.Tensor:  # noqa: N803
        return self.pipe.next_logits(tokens_BL)

    def communication_s(self) -> float:
        return self.pipe.communication_s

    def actions(self) -> list[tuple[str, float, float]]:
        return [
            (f"{action.kind} stage {action.stage} micro {action.micro}", begun, ended)
            for action, begun, ended in self.pipe.actions()
        ]

    def report(self) -> tuple[str, str]:
        measured = self.pipe.measured()
        return f"pipeline {self.pipe.schedule.name}: idle for {measured.idle()}", measured.svg()

    def _given(self, batches: Sequence[MicroBatch]) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
        there = [batch.to(self._device) for batch in batches]
        # Each stage needs the segments. The ranks of a pipeline have the same rows, so no message is needed.
        inputs: list[dict[str, object]] = [{"tokens_BL": batch.tokens, "segments": batch.segments} for batch in there]
        return inputs, [{"targets_BL": batch.targets, "reduction": "sum"} for batch in there]


class CommunicationClock:
    """Seconds that this rank has spent in communication, with the waits for other ranks. `more_s`: of messages besides the model's."""

    def __init__(self, model: nn.Module, passes: Passes) -> None:
        self._model, self._passes, self.more_s = model, passes, 0.0
        self._exchanges = exchanges_of(model)
        self._steps, self._diloco = steps_of(model), diloco_of(model)

    def seconds(self) -> float:
        """So far. It is read several times a step."""
        if not self._steps:  # the first forward makes them
            self._steps = steps_of(self._model)
        of_model = sum(step.comm_s for step in self._steps) + sum(exchange.seconds for exchange in self._exchanges)
        of_model += 0.0 if self._diloco is None else self._diloco.comm_s
        return of_model + NormTime.seconds + self._passes.communication_s() + self.more_s
