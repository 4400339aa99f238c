"""The model and the optimizer of the settings."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from collectives import Mesh
from mpitrain.config import Config, OptimConfig
from mpitrain.init import initialize
from mpitrain.models import LanguageModel, build, decay_groups
from mpitrain.optim.adamw import AdamW
from mpitrain.sharding import CPUOffloadPolicy, MixedPrecisionPolicy, checkpoint_activations, fully_shard
from mpitrain.stages import pipeline
from mpitrain.tensor import tensor_parallel
from mpitrain.train.passes import Passes, StagedPasses, WholePasses


def make_model(
    config: Config, mesh: Mesh, device: torch.device, *, has_values: bool = True
) -> tuple[LanguageModel, Passes]:
    """The model with its initial values, spread over all ranks, and its passes. Collective.

    Each block is a unit; the rest is one more unit. Without `has_values` a load or `initialize` must follow.
    """
    with torch.device("meta"), _WithoutValues():
        model = build(config.model.resolve())
    parallel = config.parallel
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, parallel.param_dtype), reduce_dtype=getattr(torch, parallel.reduce_dtype)
    )
    tensor_parallel(model, mesh["tp"], sequence=parallel.sequence)
    passes: Passes = WholePasses(model, device)
    if parallel.pipeline > 1:
        pipe = pipeline(
            model,
            mesh["pp"],
            parallel.schedule,
            micro_batches=config.train.accumulate,
            stages_per_rank=parallel.stages_per_rank,
        )
        passes = StagedPasses(pipe, device)
    for module in (*model.blocks, model):
        fully_shard(
            module,
            mesh,
            stage=parallel.stage,
            reshard_after_forward=parallel.reshard_after_forward,
            mp_policy=policy,
            storage=parallel.storage,
            offload_policy=CPUOffloadPolicy() if parallel.offload else None,
            device=device,
        )
    if (what := parallel.checkpoint_activations) != "none" and len(model.blocks):  # a stage may have no block
        partition, offload = parallel.partition_activations, parallel.offload_activations
        checkpoint_activations(model, model.blocks, what=what, partition=partition, offload=offload)
    if has_values:
        initialize(model, seed=config.train.seed)
    return model, passes


def make_optimizer(model: LanguageModel, optim: OptimConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019) on this rank's shards, without decay on norms and biases."""
    groups = decay_groups(model, optim.weight_decay)
    return AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)


class _WithoutValues(TorchFunctionMode):
    """Leaves out the initial values that modules of torch give their parameters: on the meta device these have none.

    For some of them torch imports its compiler, which takes more than a second of each rank.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        return kwargs["tensor"] if getattr(func, "__module__", "") == nn.init.__name__ else func(*args, **kwargs)
