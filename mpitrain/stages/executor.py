"""Runs one step of a schedule on the stages of one rank: forwards, backwards, and the messages between them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mpitrain.stages.messages import Messages
from mpitrain.stages.model_stages import ModelStages
from mpitrain.stages.schedules import Action
from mpitrain.stages.weight_gradients import Later, compute, waiting


class Run:
    """One step, or one evaluation. Arguments as in `Pipeline.step`."""

    def __init__(
        self,
        stages: ModelStages,
        messages: Messages,
        calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
        loss_of: Callable[[Any, int], torch.Tensor],
        last: Sequence[Mapping[str, Any]] | None,
        scale: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._stages, self._messages, self._calls = stages, messages, calls
        self._loss_of, self._last, self._scale = loss_of, last, scale
        self.total = torch.zeros((), dtype=torch.float64)
        """The sum of the losses, on the rank of the last stage."""
        self._entered: dict[tuple[int, int], torch.Tensor | None] = {}
        self._left: dict[tuple[int, int], torch.Tensor] = {}
        self._later: dict[tuple[int, int], Later] = {}

    def take(self, action: Action) -> None:
        """Run one action of the rank's program."""
        kind, stage, micro = action
        if kind == "F":
            self._forward(stage, micro)
        elif kind == "B":
            self._backward(stage, micro)
        elif kind == "I":
            with waiting() as later:
                self._backward(stage, micro)
            self._later[stage, micro] = later
        else:
            compute(self._later.pop((stage, micro)))

    def _forward(self, stage: int, micro: int) -> None:
        (args, kwargs), x = self._calls[micro], None
        is_last = stage == self._stages.num_stages - 1
        if stage:
            x = self._messages.receive("F", stage - 1, micro).requires_grad_(torch.is_grad_enabled())
        if is_last and self._last is not None:
            kwargs = {**kwargs, **self._last[micro]}
        output = self._stages(stage, x, args, kwargs)
        if is_last:
            y = self._loss_of(output, micro)
            self.total += y.detach().to("cpu", torch.float64)
            y = self._scale(y)
        else:
            y = output
            self._messages.send("F", stage, micro, y.detach())
        if torch.is_grad_enabled():
            self._entered[stage, micro], self._left[stage, micro] = x, y

    def _backward(self, stage: int, micro: int) -> None:
        x, y = self._entered.pop((stage, micro)), self._left.pop((stage, micro))
        is_last = stage == self._stages.num_stages - 1
        torch.autograd.backward(y, None if is_last else self._messages.receive("B", stage + 1, micro))
        if x is not None:
            assert x.grad is not None
            self._messages.send("B", stage, micro, x.grad)
