"""ZeRO by flat units. From the bottom: layout (pure), policy, ranks, storage, unit, context, state, fully_shard, clip."""

from mpitrain.sharding.clip import clip_grad_norm_
from mpitrain.sharding.fully_shard import communication_s, fully_shard, sharded_over, sharded_params
from mpitrain.sharding.policy import MixedPrecisionPolicy

__all__ = [
    "MixedPrecisionPolicy",
    "clip_grad_norm_",
    "communication_s",
    "fully_shard",
    "sharded_over",
    "sharded_params",
]
