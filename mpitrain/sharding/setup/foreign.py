"""What other libraries do with a model that they take for a plain one, and that goes wrong on shards: refused in one line.

Their code is not ours, so it is met where it comes by: at methods of the model's own, at an attribute that they ask for, at the
optimizer's step.
"""

import sys
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from mpitrain.sharding.unit.registry import find

_BEFORE = "call it before fully_shard"
_MERGE = (
    "write the adapter, by save_pretrained on rank 0 while all ranks are within `with mpitrain.unshard(model):`, and merge it into an "
    "unsharded model"
)
_REPLACING = {
    "resize_token_embeddings": _BEFORE
}  # transformers: on any number of ranks, as new parameters come into the model
_WRITING = {
    "merge_and_unload": _MERGE,
    "merge_adapter": _MERGE,
    "unmerge_adapter": _MERGE,
}  # peft: where parameters are cut


def refuse_methods(module: nn.Module, *, is_cut: bool) -> None:
    """From now on methods that write to whole parameters, or replace them, raise, in the module and all parts of it."""
    remedies = {**_REPLACING, **(_WRITING if is_cut else {})}
    for path, part in module.named_modules():
        known = {name: remedy for name, remedy in remedies.items() if callable(getattr(type(part), name, None))}
        param = next((name for name, _ in part.named_parameters(path)), None) if known else None
        for name, remedy in known.items():
            if param is not None:
                setattr(
                    part,
                    name,
                    partial(_refuse, f"{name}: {param} is sharded, and each rank has its rows alone; {remedy}"),
                )


def _refuse(text: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise TypeError(text)


def refuse_wrapping(module: nn.Module) -> NoReturn:
    """Of torch's DistributedDataParallel, which accelerate and `transformers.Trainer` wrap a model in.

    For an attribute that it asks a model for; who else asks for it, as `inspect.getmembers` does, is told that there is none.
    """
    if sys._getframe(2).f_globals.get("__name__") != "torch.nn.parallel.distributed":
        raise AttributeError("_ddp_params_and_buffers_to_ignore")
    name = next((name for name, _ in module.named_parameters()), "a parameter")
    raise TypeError(
        f"DistributedDataParallel: {name} is sharded by fully_shard, whose backward averages gradients by itself; train the model "
        "as it is, by a loop of your own (examples/shard_your_model.py) in place of transformers.Trainer or accelerate"
    )


def check_caller(shard: torch.Tensor) -> None:
    """TypeError if `transformers.Trainer` is about to step an optimizer of shards, this one among them."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") == "transformers.trainer":
            param = find(shard)
            raise TypeError(
                f"transformers.Trainer does not know that {'a parameter' if param is None else param.name} is sharded: it would train "
                "each rank on the same batches, and save this rank's rows; train by a loop of your own (examples/shard_your_model.py)"
            )
