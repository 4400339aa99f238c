"""A small GPT, and the trainer's settings for it in a layout. Neither torch nor MPI."""

from dataclasses import dataclass

from mpitrain.job.config import Config, ModelConfig, ParallelConfig, TrainConfig, check_ranks
from mpitrain.job.record.machine.machine import Machine
from mpitrain.tools.plan.layout import RankLayout
from mpitrain.tools.plan.settings import parallel_section
from mpitrain.tools.plan.transformer import Transformer, of_sizes


@dataclass(frozen=True)
class GptSize:
    """The GPT, and the sequences of a step."""

    width: int = 256
    layers: int = 4
    heads: int = 4
    context: int = 128
    batch: int = 8

    @property
    def model(self) -> ModelConfig:
        """In the trainer's settings. ConfigError for numbers that do not fit together."""
        return ModelConfig(
            width=self.width, layers=self.layers, heads=self.heads, context=self.context, vocab=256, tied=False
        )

    @property
    def transformer(self) -> Transformer:
        """For the planner."""
        return of_sizes(str(self), self.model.resolve(), None)

    def __str__(self) -> str:
        return f"GPT {self.width} x {self.layers}, {self.batch} sequences of {self.context} tokens"


def config_of(size: GptSize, layout: RankLayout, machine: Machine) -> Config:
    """The trainer's settings of a layout. ConfigError if it cannot run them."""
    config = Config(
        model=size.model,
        parallel=ParallelConfig(**parallel_section(layout, machine)),
        train=TrainConfig(batch=layout.batch, accumulate=layout.num_micro),
    )
    check_ranks(config, layout.ranks)
    return config
