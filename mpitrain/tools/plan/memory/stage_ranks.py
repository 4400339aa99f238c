"""One rank of a pipeline, without the others: divides a model, and runs the rank's program.

The stages run the real code of `stages/` on tensors without memory. Here is a stand-in for the messages of other ranks.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch

from mpitrain.job.config import ParallelConfig
from mpitrain.models import LanguageModel, Segments
from mpitrain.stages.division import costs_of
from mpitrain.stages.executor import PipelineRun
from mpitrain.stages.linear import take_linear_layers
from mpitrain.stages.messages import Messages
from mpitrain.stages.model_stages import ModelStages
from mpitrain.stages.schedules import Action, Schedule, make_schedule
from mpitrain.stages.schedules.dividing import divide
from mpitrain.stages.schedules.forwards import forwards


class StageRank(NamedTuple):
    """A rank of a pipeline: its number, and the schedule of a step."""

    rank: int
    schedule: Schedule


def stage_rank(parallel: ParallelConfig, rank: int, num_micro: int) -> StageRank | None:
    """Rank `rank` of the pipeline of the settings; None without a pipeline."""
    if parallel.pipeline == 1:
        return None
    return StageRank(rank, make_schedule(parallel.schedule, parallel.pipeline, num_micro, parallel.stages_per_rank))


def take_stages(model: LanguageModel, of: StageRank) -> ModelStages:
    """Divide a model as `pipeline` does: only the modules of the rank's stages stay."""
    plan, schedule = model.stage_plan, of.schedule
    mine = [stage for stage in range(schedule.num_stages) if schedule.rank_of(stage) == of.rank]
    stages = ModelStages(model, plan, divide(*costs_of(model, plan), schedule.num_stages), mine)
    take_linear_layers(model)
    return stages


def run(
    stages: ModelStages,
    of: StageRank,
    tokens: torch.Tensor,
    segments: Segments | None,
    stream: Sequence[int],
    dtype: torch.dtype,
) -> None:
    """Run a step, or without gradients the forward of one micro-batch. `tokens`: (B, L + 1); `stream`: the shape between stages."""
    schedule = of.schedule if torch.is_grad_enabled() else forwards(of.schedule, 1)
    messages = cast(Messages, _Messages(of.rank, schedule, stream, dtype))
    count = schedule.num_micro
    last = {"targets_BL": tokens[:, 1:], "reduction": "sum"}
    inputs: dict[str, object] = {"tokens_BL": tokens[:, :-1], "segments": segments}
    calls: list[tuple[tuple[()], dict[str, object]]] = [((), inputs)] * count
    program = schedule.program(of.rank)
    actions = PipelineRun(stages, messages, program, calls, lambda loss, micro: loss, [last] * count)
    for at in range(len(program)):
        actions.take(at)


class _Messages:
    """In the place of `Messages`: results of other ranks are tensors without values."""

    def __init__(self, rank: int, schedule: Schedule, stream: Sequence[int], dtype: torch.dtype) -> None:
        self._rank, self._schedule, self._stream, self._dtype = rank, schedule, tuple(stream), dtype
        self._here: dict[tuple[str, int, int], torch.Tensor] = {}

    def needed(self, action: Action) -> tuple[str, int, int] | None:
        first = next(iter(self._schedule.needed(action)), None)
        return None if first is None else ("F" if first.kind == "F" else "B", first.stage, first.micro)

    def send(self, kind: str, stage: int, micro: int, x: torch.Tensor) -> None:
        if self._schedule.rank_of(stage + 1 if kind == "F" else stage - 1) == self._rank:
            self._here[kind, stage, micro] = x

    def receive(self, kind: str, stage: int, micro: int) -> torch.Tensor:
        if self._schedule.rank_of(stage) == self._rank:
            return self._here.pop((kind, stage, micro))
        return torch.empty(self._stream, dtype=self._dtype)
