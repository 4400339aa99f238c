"""The layouts that are compared. Neither torch nor MPI."""

from dataclasses import replace

from mpitrain.tools.plan.layout import RankLayout
from mpitrain.tools.plan.measuring.small_gpt import GptSize


def layouts(ranks: int, batch: int) -> dict[str, RankLayout]:
    """The layouts by name: stages of ZeRO, storage, tensor parallelism, schedules of pipelines, micro-batches, recomputation.

    ValueError if the batch is not a multiple of 4 x `ranks`, which the micro-batches need.
    """
    if ranks < 2 or batch % (4 * ranks):
        raise ValueError(
            f"expected at least 2 ranks, and a batch that is a multiple of {4 * ranks}, got {ranks} and {batch}"
        )
    data, tensor, pipeline = RankLayout(data=ranks), RankLayout(tensor=ranks), RankLayout(pipeline=ranks)
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


def name_of(layout: RankLayout) -> str:
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


def with_changes(size: GptSize, **changes: int | None) -> GptSize:
    """The size with those of `changes` that are not None."""
    return replace(size, **{name: value for name, value in changes.items() if value is not None})
