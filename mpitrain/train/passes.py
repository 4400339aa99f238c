"""The forwards and backwards of the main job: of one model on each rank, or of the stages of a pipeline."""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Protocol

import torch

from mpitrain.models import LanguageModel
from mpitrain.stages import Pipeline
from mpitrain.train.batches.micro_batch import MicroBatch

Scale = Callable[[torch.Tensor], torch.Tensor]
"""From the loss of a micro-batch to the value whose gradient is computed."""


_EVALUATED = 64  # micro-batches in one pass of a pipeline


class Passes(Protocol):
    """The passes of a model. All methods are collective, and return the same on all ranks that hold one copy of the model."""

    def train(self, batches: Sequence[MicroBatch], scale: Scale) -> float:
        """Forward and backward of each micro-batch; returns the sum of the losses over all targets."""

    def evaluate(self, batches: Iterable[MicroBatch]) -> float:
        """The sum of the losses over all targets of all batches, without gradients."""

    def last_logits(self, tokens_BL: torch.Tensor) -> torch.Tensor:  # noqa: N803
        """(B, L) int64 -> (B, 1, V): the logits after the last token, without gradients."""

    def communication_s(self) -> float:
        """Seconds that this rank has spent in messages of the passes, with the waits for other ranks."""

    def report(self) -> tuple[str, str] | None:
        """A line about the last steps, and a picture of them as SVG; None if there is nothing to tell."""


class WholePasses:
    """The passes of a model that each rank computes from the first block to the last."""

    def __init__(self, model: LanguageModel, device: torch.device) -> None:
        self._model, self._device = model, device

    def train(self, batches: Sequence[MicroBatch], scale: Scale) -> float:
        total = torch.zeros((), device=self._device)
        for batch in batches:
            loss = self._loss(batch)
            scale(loss).backward()
            total += loss.detach()
        return total.item()

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch]) -> float:
        return sum(self._loss(batch).item() for batch in batches)

    @torch.no_grad()
    def last_logits(self, tokens_BL: torch.Tensor) -> torch.Tensor:  # noqa: N803
        return self._model(tokens_BL)[:, -1:]

    def communication_s(self) -> float:
        return 0.0

    def report(self) -> None:
        return None

    def _loss(self, batch: MicroBatch) -> torch.Tensor:
        there = batch.to(self._device)
        return self._model(there.tokens, there.targets, reduction="sum", segments=there.segments)


class StagedPasses:
    """The passes of a pipeline."""

    def __init__(self, pipe: Pipeline, device: torch.device) -> None:
        self._pipe, self._device = pipe, device

    def train(self, batches: Sequence[MicroBatch], scale: Scale) -> float:
        inputs, last = self._given(batches)
        return self._pipe.step(inputs, last=last, scale=scale).item()

    def evaluate(self, batches: Iterable[MicroBatch]) -> float:
        total, left = 0.0, iter(batches)
        while group := list(islice(left, _EVALUATED)):
            inputs, last = self._given(group)
            total += self._pipe.evaluate(inputs, last=last).item()
        return total

    def last_logits(self, tokens_BL: torch.Tensor) -> torch.Tensor:  # noqa: N803
        return self._pipe.next_logits(tokens_BL)

    def communication_s(self) -> float:
        return self._pipe.communication_s

    def report(self) -> tuple[str, str]:
        measured = self._pipe.measured()
        return f"pipeline {self._pipe.schedule.name}: idle for {measured.idle()}", measured.svg()

    def _given(self, batches: Sequence[MicroBatch]) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
        there = [batch.to(self._device) for batch in batches]
        # Each stage needs the segments. The ranks of a pipeline have the same rows, so no message is needed.
        inputs: list[dict[str, object]] = [{"tokens_BL": batch.tokens, "segments": batch.segments} for batch in there]
        return inputs, [{"targets_BL": batch.targets, "reduction": "sum"} for batch in there]
