"""The model and the optimizer of the settings."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from collectives import Mesh
from mpitrain.job.config import Config, OptimConfig, ParallelConfig
from mpitrain.job.train.passes import Passes, StagedPasses, WholePasses
from mpitrain.models import LanguageModel, build, decay_groups, layer_groups, muon_groups
from mpitrain.optim import LAMB, LARS, SGD, AdamW, Muon
from mpitrain.sharding import CPUOffloadPolicy, DiLoCo, MixedPrecisionPolicy, checkpoint_activations, fully_shard
from mpitrain.sharding.compression import compress_gradients, power_sgd, top_k
from mpitrain.sharding.compression.power_sgd import PowerSGD
from mpitrain.sharding.compression.top_k import TopK
from mpitrain.stages import pipeline
from mpitrain.tensor import tensor_parallel
from mpitrain.weights.initial_values import initialize


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
            micro_batches=config.train.micro_batches(mesh["dp_replicate", "dp_shard", "cp"].size),
            stages_per_rank=parallel.stages_per_rank,
        )
        passes = StagedPasses(pipe, device)
    fully_shard(  # one call: the storage is decided for the whole model
        model,
        mesh,
        stage=parallel.stage,
        reshard_after_forward=parallel.reshard_after_forward,
        mp_policy=policy,
        units=model.blocks,
        storage=parallel.storage,
        offload_policy=CPUOffloadPolicy() if parallel.offload else None,
        device=device,
        cut=parallel.cut,
        wire=parallel.wire,
        wire_weights=parallel.wire_weights,
        slices=config.train.slices,
    )
    if (hook := _hook(config)) is not None:
        compress_gradients(model, hook)
    if (what := parallel.checkpoint_activations) != "none" and len(model.blocks):  # a stage may have no block
        partition, offload = parallel.partition_activations, parallel.offload_activations
        checkpoint_activations(model, model.blocks, what=what, partition=partition, offload=offload)
    if has_values:
        initialize(model, seed=config.train.seed)
    return model, passes


def _hook(config: Config) -> PowerSGD | TopK | None:
    """The compression of gradients that the settings ask for."""
    parallel = config.parallel
    common: dict[str, Any] = {"exact_steps": parallel.exact_steps, "error_feedback": parallel.compress_feedback}
    match parallel.compress:
        case "power_sgd":
            return power_sgd(parallel.compress_rank, seed=config.train.seed, **common)
        case "top_k":
            return top_k(parallel.compress_share, clip_norm=config.optim.clip_norm or None, **common)
    return None


def make_diloco(model: LanguageModel, parallel: ParallelConfig) -> DiLoCo | None:
    """The local steps of the settings; None without them. A load, or `restart`, must follow. Collective."""
    if not parallel.local_steps:
        return None
    is_nesterov = parallel.outer == "nesterov"
    return DiLoCo(
        model,
        every=parallel.local_steps,
        outer=parallel.outer,
        lr=parallel.outer_lr if is_nesterov else None,
        momentum=parallel.outer_momentum if is_nesterov else None,
        exact_steps=parallel.exact_steps,
    )


def make_optimizer(model: LanguageModel, optim: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer of this rank's shards, without decay on norms and biases.

    A group may have an "lr_factor", by which the learning rate of a step is multiplied.
    """
    groups, lr, betas, eps = _groups(model, optim), optim.resolve().lr, optim.betas, optim.eps
    momentum = optim.momentum if optim.momentum is not None else 0.95 if optim.name == "muon" else 0.9
    match optim.name:
        case "muon":
            return Muon(groups, lr, momentum=momentum, ns_dtype=optim.ns_dtype, betas=betas, eps=eps)
        case "lamb":
            return LAMB(groups, lr, betas=betas, eps=eps)
        case "lars":
            return LARS(groups, lr, momentum=momentum, eps=eps)
        case "sgd":
            return SGD(groups, lr, momentum, nesterov=momentum > 0, fused=True)
    return AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)


def _groups(model: LanguageModel, optim: OptimConfig) -> list[dict[str, Any]]:
    """Parameter groups, the same on all ranks, with what the optimizer needs to know of them."""
    make_groups = muon_groups if optim.name == "muon" else decay_groups
    lr, weight_decay = optim.resolve()
    matrices, *others = make_groups(model, weight_decay)
    if optim.name in ("lamb", "lars"):
        matrices["always_adapt"] = True  # also if the weight decay is 0
    if optim.matrix_lr is not None:
        matrices["lr_factor"] = optim.matrix_lr / lr
    groups = [matrices, *others]
    return groups if optim.layer_decay == 1 else layer_groups(model, groups, optim.layer_decay)


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
