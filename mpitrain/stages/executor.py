"""Runs the program of one rank on its stages: forwards, backwards, and the messages between them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from time import perf_counter
from typing import Any

import torch

from collectives.diagnosis import show_all_ranks
from mpitrain.plans.draws import seed_all
from mpitrain.stages.messages import Messages
from mpitrain.stages.model_stages import ModelStages
from mpitrain.stages.places import places_of
from mpitrain.stages.records import Record
from mpitrain.stages.schedules import Action
from mpitrain.stages.tied import TiedRounds
from mpitrain.torch_glue.torch_internals import backward
from mpitrain.torch_glue.weight_gradients import Later, added_in_place, compute, waiting


class PipelineRun:
    """One step, or one evaluation. Arguments as in `Pipeline.step`; `program`: the actions of this rank; `waited`: gets the seconds of
    each wait for another rank's result, before the action that needs it; `around`: makes what is open while an action computes;
    `tied`: of a step with slices, in which each backward of a stage is a round that reduces the gradients of its weights at once."""

    def __init__(
        self,
        stages: ModelStages,
        messages: Messages,
        program: Sequence[Action],
        calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
        loss_of: Callable[[Any, int], torch.Tensor],
        last: Sequence[Mapping[str, Any]] | None = None,
        scale: Callable[[torch.Tensor], torch.Tensor] | None = None,
        seeds: Sequence[Sequence[int]] | None = None,
        *,
        waited: Callable[[float], None] = lambda seconds: None,
        around: Callable[[Action], AbstractContextManager[Any]] = lambda action: nullcontext(),
        tied: TiedRounds | None = None,
    ) -> None:
        self._waited, self._around, self._tied = waited, around, tied
        self._model: Any = stages.model  # with slices, a sharded one
        self._stages, self.messages, self._calls, self.program = stages, messages, calls, program
        self._loss_of, self._last, self._scale, self._seeds = loss_of, last, scale, seeds
        self.losses = torch.zeros(len(calls), dtype=torch.float64)
        """The loss of each micro-batch, on the rank of the last stage."""
        self.record = Record(perf_counter())
        # The last action that computes gradients of weights, of each stage: then their hooks run.
        self._last_of_weights = set(
            {action.stage: at for at, action in enumerate(program) if action.kind in ("B", "W")}.values()
        )
        self._entered: dict[tuple[int, int], torch.Tensor | None] = {}
        self._left: dict[tuple[int, int], torch.Tensor] = {}
        self._later: dict[tuple[int, int], Later] = {}

    def take(self, at: int) -> None:
        """Run the action of that number in the program. An error has a note that says where each micro-batch was."""
        action, before = self.program[at], perf_counter()
        try:
            if self._tied is not None:
                self._model.set_stage(action.stage, is_round=action.kind in ("B", "W"))
            came = self._come(action)
            begun = perf_counter()
            self._waited(begun - before)
            in_place = action.kind != "F" and at not in self._last_of_weights and self._tied is None
            with self._around(action), added_in_place() if in_place else nullcontext():
                self._compute(action, came)
        except Exception as error:
            error.add_note(places_of(self.program, at))
            show_all_ranks(error)
            raise
        self.record.add(begun, perf_counter())

    def all(self) -> None:
        """Run the whole program."""
        for at in range(len(self.program)):
            self.take(at)

    def end(self) -> None:
        """Wait until the other ranks have the messages."""
        self.messages.end()
        if self._tied is not None:
            self._tied.end()

    def _come(self, action: Action) -> torch.Tensor | None:
        """What the action needs from another stage."""
        needed = self.messages.needed(action)
        came = None if needed is None else self.messages.receive(*needed)
        if self._tied is not None and action.kind in ("B", "W"):
            self._tied.before_round(action.stage)
        return came

    def _compute(self, action: Action, came: torch.Tensor | None) -> None:
        kind, stage, micro = action
        if kind == "F":
            self._forward(stage, micro, came)
        elif kind == "B":
            with self._one_backward():
                self._backward(stage, micro, came)
            if self._tied is not None:
                self._tied.after_backward(stage)
        elif kind == "I":
            with self._one_backward(), waiting() as later:
                self._backward(stage, micro, came)
            self._later[stage, micro] = later if self._tied is None else self._all_later(stage, later, self._tied)
        else:
            with self._one_backward():
                compute(self._later.pop((stage, micro)))

    def _one_backward(self) -> AbstractContextManager[Any]:
        """What is open around each backward. Ranks with other data may skip all layers of a stage, so that an action has none."""
        each: Any = getattr(self._model, "one_backward", nullcontext)
        return each()

    def _forward(self, stage: int, micro: int, x: torch.Tensor | None) -> None:
        args, kwargs = self._calls[micro]
        is_last = stage == self._stages.num_stages - 1
        if x is not None:
            x.requires_grad_(torch.is_grad_enabled())
        if is_last and self._last is not None:
            kwargs = {**kwargs, **self._last[micro]}
        if self._seeds is not None:
            seed_all(*self._seeds[micro])
        y = self._stages(stage, x, args, kwargs)
        if is_last:
            y = self._loss_of(y, micro)
            if not isinstance(y, torch.Tensor) or y.numel() != 1:
                raise ValueError(
                    f"expected the loss of a micro-batch, one number, got {_shown(y)}; pass the targets in last=, or loss_of=, a "
                    "function of the output"
                )
            self.losses[micro] = y.detach().to("cpu", torch.float64)
            y = y if self._scale is None else self._scale(y)
        else:
            self.messages.send("F", stage, micro, y.detach())
        if torch.is_grad_enabled():
            self._entered[stage, micro], self._left[stage, micro] = x, y

    def _backward(self, stage: int, micro: int, grad: torch.Tensor | None) -> None:
        x, y = self._entered.pop((stage, micro)), self._left.pop((stage, micro))
        if y.requires_grad:  # not if all parameters of the first stage are frozen, or none was used
            if grad is None:
                y.backward()
            else:
                backward([y], [grad])
        if x is not None:
            self.messages.send("B", stage, micro, torch.zeros_like(x) if x.grad is None else x.grad)

    def _all_later(self, stage: int, later: Later, tied: TiedRounds) -> Later:
        """Leave all gradients of a backward to its second half, the round, but those that the stage lends: see [Note: tied slices]."""
        lent = tied.lent_by(stage)
        now: Later = []
        left: Later = []
        for layer in later:
            (now if any(_is_of(param, lent) for param in layer[0]) else left).append(layer)
        if lent:
            with self._one_backward():
                compute(now)
        tied.after_backward(stage)
        return [*(([full], partial(tuple, [grad])) for full, grad in self._model.take_full_gradients()), *left]


def _is_of(param: torch.Tensor | None, lent: Sequence[torch.Tensor]) -> bool:
    """Whether a layer's parameter is one of these, or a view of one."""
    return param is not None and any(full is param or full is param._base for full in lent)


def _shown(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
