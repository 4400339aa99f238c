"""ZeRO by flat units: `setup/` checks and cuts a model, `step/` orders the events of a step, `unit/` holds parameters and gradients,
`optim/` is what comes before an optimizer's step. `api.py` is the way in."""

from mpitrain.sharding.api import fully_shard
from mpitrain.sharding.buffers import sync_buffers
from mpitrain.sharding.checkpointing import checkpoint_activations
from mpitrain.sharding.full import unshard
from mpitrain.sharding.module import communication_s
from mpitrain.sharding.optim.clip import clip_grad_norm_, grad_norms
from mpitrain.sharding.optim.ema import EMA
from mpitrain.sharding.optim.scaler import GradScaler
from mpitrain.sharding.overview import num_parameters, summary
from mpitrain.sharding.places import name_places
from mpitrain.sharding.setup.policy import CPUOffloadPolicy, MixedPrecisionPolicy
from mpitrain.sharding.unit.registry import sharded_over, sharded_params

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

name_places()
