"""mpitrain: trains torch models that do not fit one process, on plain MPI.

    fully_shard(block) for each block, fully_shard(model); then an optimizer on model.parameters(), and train as always.

The main job is `mpirun -np N python -m mpitrain`. Importing this package imports neither torch nor MPI; using what it offers does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpitrain.full_state import full_state_dict, load_full_state_dict
    from mpitrain.init import initialize
    from mpitrain.sharding import (
        EMA,
        CPUOffloadPolicy,
        GradScaler,
        MixedPrecisionPolicy,
        checkpoint_activations,
        clip_grad_norm_,
        fully_shard,
        grad_norms,
        num_parameters,
        summary,
        sync_buffers,
        unshard,
    )
    from mpitrain.state import load, save
    from mpitrain.weights import export_weights, load_weights

__all__ = [
    "EMA",
    "CPUOffloadPolicy",
    "GradScaler",
    "MixedPrecisionPolicy",
    "checkpoint_activations",
    "clip_grad_norm_",
    "export_weights",
    "full_state_dict",
    "fully_shard",
    "grad_norms",
    "initialize",
    "load",
    "load_full_state_dict",
    "load_weights",
    "num_parameters",
    "save",
    "summary",
    "sync_buffers",
    "unshard",
]

_ROOMS = {
    "CPUOffloadPolicy": "sharding",
    "EMA": "sharding",
    "GradScaler": "sharding",
    "MixedPrecisionPolicy": "sharding",
    "checkpoint_activations": "sharding",
    "clip_grad_norm_": "sharding",
    "export_weights": "weights",
    "full_state_dict": "full_state",
    "fully_shard": "sharding",
    "grad_norms": "sharding",
    "initialize": "init",
    "load": "state",
    "load_full_state_dict": "full_state",
    "load_weights": "weights",
    "num_parameters": "sharding",
    "save": "state",
    "summary": "sharding",
    "sync_buffers": "sharding",
    "unshard": "sharding",
}


def __getattr__(name: str) -> Any:
    # A wrong setting is to be found, and a request to stop to be heard, before torch is loaded: that takes seconds.
    if name in _ROOMS:
        return getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
