"""Pipelines over all ranks, ours and torch's: each micro-batch is one sequence of the whole batch."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from mpitrain.models import GPT, GPTConfig
from mpitrain.stages import pipeline
from mpitrain.stages.division import costs_of
from mpitrain.stages.schedules.dividing import divide
from mpitrain.tools.bench.model import TrainedModel, TrainingSetup
from mpitrain.weights.initial_values import initialize


class StagedModel(TrainedModel):
    """A model in stages: its `forward` contains the backwards."""

    takes_whole_batch = True

    def backward(self, loss: torch.Tensor) -> None:
        """The backwards have run in `forward`."""


class OurPipeline(StagedModel):
    """Our `pipeline`. `num_micro`: sequences of a step."""

    def __init__(self, config: GPTConfig, setup: TrainingSetup, schedule: str, num_micro: int) -> None:
        with torch.device("meta"):
            model = GPT(config)
        self._pipe = pipeline(model, setup.comm, schedule, micro_batches=num_micro)
        initialize(model)
        super().__init__(model)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        inputs = [rows[:, :-1] for rows in tokens.split(1)]
        last = [{"targets_BL": rows[:, 1:]} for rows in tokens.split(1)]
        return self._pipe.step(inputs, last=last, scale=lambda loss: loss / len(inputs)).mean()

    def planned_s(self) -> float:
        return self._pipe.measured().planned().total


TORCH_SCHEDULES = {
    "torch-gpipe": "ScheduleGPipe",
    "torch-1f1b": "Schedule1F1B",
    "torch-interleaved": "ScheduleInterleaved1F1B",
    "torch-zb-v": "ScheduleZBVZeroBubble",
}
"""The classes of torch.distributed.pipelining by the names of the command line."""


class TorchPipeline(StagedModel):
    """torch's pipelining over Gloo or NCCL, with stages of the same blocks as ours."""

    def __init__(self, config: GPTConfig, setup: TrainingSetup, name: str, num_micro: int) -> None:
        from torch.distributed import pipelining

        comm, kind = setup.comm, getattr(pipelining, TORCH_SCHEDULES[name])
        self._comm, count = comm, 1 if name in ("torch-gpipe", "torch-1f1b") else 2
        num_stages = count * comm.size
        mine = [comm.rank, num_stages - 1 - comm.rank if name == "torch-zb-v" else comm.rank + comm.size][:count]
        self._rank_of_last = 0 if name == "torch-zb-v" else comm.size - 1
        with torch.device("meta"):
            whole = GPT(config)
        division = divide(*costs_of(whole, whole.stage_plan), num_stages)
        parts = nn.ModuleList(_Stage(whole, stage, division) for stage in mine)
        parts.to_empty(device=setup.device)
        for part in parts:
            initialize(part)
        stages = [
            pipelining.PipelineStage(part, stage, num_stages, setup.device)
            for part, stage in zip(parts, mine, strict=True)
        ]
        self._schedule: Any = kind(stages if count > 1 else stages[0], num_micro, loss_fn=_loss)
        self._is_first, self._is_last = 0 in mine, num_stages - 1 in mine
        super().__init__(parts)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        inputs = [tokens[:, :-1].contiguous()] if self._is_first else []
        if self._is_last:
            self._schedule.step(*inputs, target=tokens[:, 1:].contiguous(), losses=losses)
        else:
            self._schedule.step(*inputs)
        loss = torch.stack(losses).mean().detach().cpu() if losses else torch.zeros(())
        self._comm.broadcast(loss, self._rank_of_last)
        return loss


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class _Stage(nn.Module):
    """A stage of a GPT for torch: its modules, under their names in the GPT."""

    def __init__(self, whole: GPT, stage: int, division: Sequence[range]) -> None:
        super().__init__()
        self.init_rule: Any = whole.init_rule
        self.blocks = nn.ModuleDict({str(at): whole.blocks[at] for at in division[stage]})
        self.is_first, self.is_last = stage == 0, stage == len(division) - 1
        if self.is_first:
            self.wte, self.wpe = whole.wte, whole.wpe
        if self.is_last:
            self.ln_f, self.head = whole.ln_f, whole.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_first:
            x = self.wte(x) + self.wpe(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.ln_f(x)) if self.is_last else x
