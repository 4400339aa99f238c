"""The model and the layouts that are compared. Neither torch nor MPI."""

from dataclasses import dataclass, replace

from mpitrain.config import Config, ModelConfig, ParallelConfig, TrainConfig, check_ranks
from mpitrain.plan.layout import Layout
from mpitrain.plan.machine import Machine
from mpitrain.plan.settings import parallel_section
from mpitrain.plan.transformer import Transformer, of_sizes


@dataclass(frozen=True)
class Size:
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


def layouts(ranks: int, batch: int) -> dict[str, Layout]:
    """The layouts by name: stages of ZeRO, storage, tensor parallelism, schedules of pipelines, micro-batches, recomputation.

    ValueError if the batch is not a multiple of 4 x `ranks`, which the micro-batches need.
    """
    if ranks < 2 or batch % (4 * ranks):
        raise ValueError(
            f"expected at least 2 ranks, and a batch that is a multiple of {4 * ranks}, got {ranks} and {batch}"
        )
    data, tensor, pipeline = Layout(data=ranks), Layout(tensor=ranks), Layout(pipeline=ranks)
    resident = data._replace(resident=True)
    many = 4 * ranks  # micro-batches of a pipeline
    chosen = [
        (data, 1),
        (data, 4),
        (resident._replace(zero=1), 1),
        (data._replace(zero=1), 1),
        (resident._replace(zero=2), 2),
        (data._replace(zero=2), 4),
        (resident._replace(zero=2, recompute="block"), 1),
        (resident._replace(zero=3), 4),
        (data._replace(zero=3), 1),
        (data._replace(zero=3), 4),
        (data._replace(zero=3, recompute="attention"), 2),
        (tensor, 1),
        (tensor, 4),
        (tensor._replace(recompute="block"), 1),
        (tensor._replace(sequence=False), 1),
        (pipeline._replace(schedule="gpipe"), ranks),
        (pipeline, 2 * ranks),
        (pipeline, many),
        (pipeline._replace(recompute="block"), many),
        (pipeline._replace(schedule="zb-h1"), many),
        (pipeline._replace(schedule="interleaved", stages_per_rank=2), 2 * ranks),
        (pipeline._replace(schedule="zb-v", stages_per_rank=2), many),
    ]
    made = [one._replace(micro=batch // (one.data * num_micro), batch=batch) for one, num_micro in chosen]
    return {name_of(one): one for one in made}


def name_of(layout: Layout) -> str:
    """A short name."""
    parts = [str(layout)]
    if layout.data > 1:
        parts.append(f"ZeRO {layout.zero}")
    if layout.zero:
        parts.append("resident" if layout.resident else "private")
    if layout.tensor > 1:
        parts.append("sequence" if layout.sequence else "no sequence")
    if layout.pipeline > 1:
        parts.append(layout.schedule)
    parts.append(f"{layout.num_micro} x {layout.micro}")
    if layout.recompute != "none":
        parts.append(f"recompute {layout.recompute}")
    return ", ".join(parts)


def config_of(size: Size, layout: Layout, machine: Machine) -> Config:
    """The trainer's settings of a layout. ConfigError if it cannot run them."""
    config = Config(
        model=size.model,
        parallel=ParallelConfig(**parallel_section(layout, machine)),
        train=TrainConfig(batch=layout.batch, accumulate=layout.num_micro),
    )
    check_ranks(config, layout.ranks)
    return config


def with_changes(size: Size, **changes: int | None) -> Size:
    """The size with those of `changes` that are not None."""
    return replace(size, **{name: value for name, value in changes.items() if value is not None})
