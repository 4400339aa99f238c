"""mpitrain: trains torch models that do not fit one process, on plain MPI.

    fully_shard(block) for each block, fully_shard(model); then an optimizer on model.parameters(), and train as always.

The main job is `mpirun -np N python -m mpitrain`. Importing this package imports neither torch nor MPI; using what it offers does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpitrain.init import initialize
    from mpitrain.sharding import MixedPrecisionPolicy, clip_grad_norm_, fully_shard
    from mpitrain.state import full_state_dict, load, save

__all__ = [
    "MixedPrecisionPolicy",
    "clip_grad_norm_",
    "full_state_dict",
    "fully_shard",
    "initialize",
    "load",
    "save",
]

_ROOMS = {
    "MixedPrecisionPolicy": "sharding",
    "clip_grad_norm_": "sharding",
    "full_state_dict": "state",
    "fully_shard": "sharding",
    "initialize": "init",
    "load": "state",
    "save": "state",
}


def __getattr__(name: str) -> Any:
    # A wrong setting is to be found, and a request to stop to be heard, before torch is loaded: that takes seconds.
    if name in _ROOMS:
        return getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
