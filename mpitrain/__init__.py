"""mpitrain: trains torch models that do not fit one process, on plain MPI.

    fully_shard(block) for each block, fully_shard(model); then an optimizer on model.parameters(), and train as always.

The main job is `mpirun -np N python -m mpitrain`. Importing this package imports neither torch nor MPI; using its functions does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mpitrain import optim as optim
from mpitrain._moved import keep_old_paths

if TYPE_CHECKING:
    from mpitrain import data as data
    from mpitrain import elastic as elastic
    from mpitrain import health as health
    from mpitrain import models as models
    from mpitrain import tensor as tensor
    from mpitrain.job.record.adding import Callback, log
    from mpitrain.job.record.sinks import Sink
    from mpitrain.placement.axes import mesh
    from mpitrain.placement.batch_norm import convert_sync_batchnorm
    from mpitrain.plans.draws import seed_all
    from mpitrain.sharding import (
        EMA,
        CPUOffloadPolicy,
        DiLoCo,
        GradScaler,
        MixedPrecisionPolicy,
        checkpoint_activations,
        clip_grad_norm_,
        fully_shard,
        grad_norms,
        num_parameters,
        register_forward_method,
        summary,
        sync_buffers,
        unshard,
    )
    from mpitrain.sharding.compression.api import compress_gradients
    from mpitrain.sharding.compression.power_sgd import power_sgd
    from mpitrain.sharding.compression.top_k import top_k
    from mpitrain.sharding.rounds import rounds, slice_mean
    from mpitrain.stages import StagePlan, pipeline
    from mpitrain.tensor import tensor_parallel
    from mpitrain.view.reading.run import read_run
    from mpitrain.weights import export_weights, load_weights
    from mpitrain.weights.initial_values import initialize
    from mpitrain.weights.state import load, save
    from mpitrain.weights.whole.full_state import full_state_dict, load_full_state_dict

__all__ = [
    "EMA",
    "CPUOffloadPolicy",
    "Callback",
    "DiLoCo",
    "GradScaler",
    "MixedPrecisionPolicy",
    "Sink",
    "StagePlan",
    "checkpoint_activations",
    "clip_grad_norm_",
    "compress_gradients",
    "convert_sync_batchnorm",
    "export_weights",
    "full_state_dict",
    "fully_shard",
    "grad_norms",
    "initialize",
    "load",
    "load_full_state_dict",
    "load_weights",
    "log",
    "mesh",
    "num_parameters",
    "pipeline",
    "power_sgd",
    "read_run",
    "register_forward_method",
    "rounds",
    "save",
    "seed_all",
    "slice_mean",
    "summary",
    "sync_buffers",
    "tensor_parallel",
    "top_k",
    "unshard",
]

_MODULES = {
    "Callback": "job.record.adding",
    "Sink": "job.record.sinks",
    "StagePlan": "stages",
    "compress_gradients": "sharding.compression",
    "convert_sync_batchnorm": "placement.batch_norm",
    "export_weights": "weights",
    "full_state_dict": "weights.whole.full_state",
    "initialize": "weights.initial_values",
    "load": "weights.state",
    "load_full_state_dict": "weights.whole.full_state",
    "load_weights": "weights",
    "log": "job.record.adding",
    "mesh": "placement.axes",
    "pipeline": "stages",
    "power_sgd": "sharding.compression",
    "read_run": "view.reading.run",
    "rounds": "sharding.rounds",
    "save": "weights.state",
    "seed_all": "plans.draws",
    "slice_mean": "sharding.rounds",
    "tensor_parallel": "tensor",
    "top_k": "sharding.compression",
}
"""The modules that define public names. The other names are defined in `sharding`."""

_FOLDERS = {"data", "elastic", "health", "models", "tensor"}
"""With public names of their own, as `mpitrain.elastic.run`."""


keep_old_paths()


def __getattr__(name: str) -> Any:
    # Loading torch takes seconds. Before that the settings are checked, and the process listens for a request to stop.
    if name in _FOLDERS:
        return import_module(f"{__name__}.{name}")
    if name in __all__:
        globals()[name] = value = getattr(import_module(f"{__name__}.{_MODULES.get(name, 'sharding')}"), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
