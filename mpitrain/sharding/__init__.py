"""ZeRO with flat units. `fully_shard` in `api.py` is the entry point.

- `setup/` checks a model and the arguments, and finds the blocks that become units.
- `unit/` has the state of one unit: its parameters, their memory, and their gradients.
- `step/` has the order of events in a forward and a backward of the whole model.
- `local/` has the steps in which the copies of a model train apart, and the outer steps that bring them together.
- `optim/` has the functions that run between the backward and the optimizer's step.

Four verbs mean the same everywhere: `end` what has begun, in order; `abandon` it after an exception, without a result; `free` memory or
records that are not needed any more; `reset` to the state of the beginning.

The comment at the top of `step/step.py` follows one parameter from a forward to the next forward, and one gradient from autograd to the
optimizer.
"""

from mpitrain.sharding.api import fully_shard
from mpitrain.sharding.buffers import sync_buffers
from mpitrain.sharding.checkpointing import checkpoint_activations
from mpitrain.sharding.full import unshard
from mpitrain.sharding.local.diloco import DiLoCo
from mpitrain.sharding.methods import register_forward_method
from mpitrain.sharding.module import communication_s
from mpitrain.sharding.optim.clip import clip_grad_norm_, grad_norms
from mpitrain.sharding.optim.ema import EMA
from mpitrain.sharding.optim.scaler import GradScaler
from mpitrain.sharding.overview import num_parameters, summary
from mpitrain.sharding.places import name_places
from mpitrain.sharding.unit.policy import CPUOffloadPolicy, MixedPrecisionPolicy
from mpitrain.sharding.unit.unit import sharded_over, sharded_params

__all__ = [
    "EMA",
    "CPUOffloadPolicy",
    "DiLoCo",
    "GradScaler",
    "MixedPrecisionPolicy",
    "checkpoint_activations",
    "clip_grad_norm_",
    "communication_s",
    "fully_shard",
    "grad_norms",
    "num_parameters",
    "register_forward_method",
    "sharded_over",
    "sharded_params",
    "summary",
    "sync_buffers",
    "unshard",
]

name_places()
