"""The checks of the settings against a number of ranks."""

from __future__ import annotations

from mpitrain.job.config.errors import ConfigError
from mpitrain.job.config.settings import Config
from mpitrain.models.sizes import LlamaConfig
from mpitrain.stages.schedules import make_schedule


def check_ranks(config: Config, num_ranks: int) -> None:
    """Check the settings that depend on the number of ranks.

    Raises:
        ConfigError: the global batch is not a multiple of data-parallel ranks x micro-batches (an elastic run without a pipeline needs
            only as many sequences); the ranks are not a multiple of copies x tensor x pipeline; steps are local with one copy;
            `tensor` ranks cannot share the model's heads, key and value heads, or context; or `pipeline` ranks cannot share its blocks,
            or run the schedule.
    """
    copies, tensor, pipeline = config.parallel.copies, config.parallel.tensor, config.parallel.pipeline
    if tensor * pipeline == 1 and num_ranks % copies:
        raise ConfigError(
            f"parallel.copies: {num_ranks} ranks do not make {copies} copies; take a divisor of {num_ranks}"
        )
    if num_ranks % (copies * tensor * pipeline):
        factors = {"copies": copies, "tensor": tensor, "pipeline": pipeline}
        used = [(name, size) for name, size in factors.items() if size > 1 or (name == "copies" and pipeline == 1)]
        raise ConfigError(
            f"parallel.{used[-1][0]}: expected a multiple of {copies * tensor * pipeline} ranks = "
            f"{' x '.join(f'{size} (parallel.{name})' for name, size in used)}, got {num_ranks}"
        )
    if config.parallel.local_steps and copies == 1 and not config.train.elastic:  # a loss may leave one copy
        raise ConfigError(
            "parallel.local_steps: the model has one copy, so no step would be local; take a larger parallel.copies, such as the "
            "number of hosts"
        )
    _check_stages(config, num_ranks // (tensor * pipeline))
    sizes = config.model.resolve()
    if sizes.heads < tensor:
        raise ConfigError(f"parallel.tensor: {tensor} ranks cannot share {sizes.heads} heads (model.heads)")
    if isinstance(sizes, LlamaConfig) and (count := sizes.kv_heads) < sizes.heads:
        if sizes.heads % tensor:
            raise ConfigError(
                f"parallel.tensor: {tensor} ranks cannot share {sizes.heads} heads (model.heads) equally, which grouped queries "
                f"(model.kv_heads = {count}) need; take a divisor of {sizes.heads}"
            )
        if count % tensor and tensor % count:
            raise ConfigError(
                f"parallel.tensor: {tensor} ranks cannot share {count} key and value heads (model.kv_heads) equally; take a "
                f"divisor or a multiple of {count}"
            )
    if config.parallel.sequence and sizes.context % tensor:
        raise ConfigError(
            f"parallel.tensor: {tensor} ranks cannot share {sizes.context} tokens (model.context) equally; take a multiple, or "
            "--parallel.sequence false"
        )
    batch, accumulate = config.train.batch, config.train.accumulate
    factor = num_ranks // (tensor * pipeline) * accumulate
    if config.train.slices:
        if factor > config.train.slices:
            raise ConfigError(
                f"train.slices: {factor} ranks with different data cannot share {config.train.slices}, because each trains whole "
                f"slices; expected at least {factor}, so {1 << (factor - 1).bit_length()} or a larger power of two"
            )
        return
    if config.train.elastic and pipeline == 1 and batch >= factor:
        return
    if batch % factor:
        fitting = [str(n) for n in (batch // factor * factor, (batch // factor + 1) * factor) if n]
        ranks = f"{num_ranks} ranks" + f" / {tensor} (parallel.tensor)" * (tensor > 1)
        ranks += f" / {pipeline} (parallel.pipeline)" * (pipeline > 1)
        raise ConfigError(
            f"train.batch: expected a multiple of {factor} = {ranks} x {accumulate} (train.accumulate), "
            f"got {batch}; nearest multiples: {' or '.join(fitting)}"
        )


def _check_stages(config: Config, num_data: int) -> None:
    """ConfigError if the settings make no pipeline. `num_data`: the ranks with different data."""
    parallel, train = config.parallel, config.train
    if parallel.pipeline == 1:
        return
    num_micro = train.micro_batches(num_data)
    try:
        schedule = make_schedule(parallel.schedule, parallel.pipeline, num_micro, parallel.stages_per_rank)
    except ValueError as error:
        remark = "train.accumulate is the number of micro-batches"
        if train.slices:
            remark = f"the micro-batches are the slices of a rank: {num_micro} of train.slices {train.slices}"
        raise ConfigError(f"parallel.schedule: {error}; {remark}") from None
    layers = config.model.resolve().layers
    if schedule.num_stages > layers + 1:  # the head may be a stage without a block
        raise ConfigError(
            f"parallel.pipeline: {schedule.num_stages} stages cannot share {layers} blocks (model.layers), of which each but the last "
            "needs one"
        )
