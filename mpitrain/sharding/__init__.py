"""ZeRO by flat units. From the bottom: layout (pure), policy, ranks, tree, storage, unit, fences, reductions, prefetch, context, state,
readiness, module, blocks, checkpointing, options, agreement, fully_shard, the rest."""

from mpitrain.sharding.buffers import sync_buffers
from mpitrain.sharding.checkpointing import checkpoint_activations
from mpitrain.sharding.clip import clip_grad_norm_, grad_norms
from mpitrain.sharding.ema import EMA
from mpitrain.sharding.fully_shard import fully_shard
from mpitrain.sharding.module import communication_s, sharded_over, sharded_params
from mpitrain.sharding.policy import CPUOffloadPolicy, MixedPrecisionPolicy
from mpitrain.sharding.scaler import GradScaler
from mpitrain.sharding.summary import num_parameters, summary
from mpitrain.sharding.unshard import unshard

__all__ = [
    "EMA",
    "CPUOffloadPolicy",
    "GradScaler",
    "MixedPrecisionPolicy",
    "checkpoint_activations",
    "clip_grad_norm_",
    "communication_s",
    "fully_shard",
    "grad_norms",
    "num_parameters",
    "sharded_over",
    "sharded_params",
    "summary",
    "sync_buffers",
    "unshard",
]
