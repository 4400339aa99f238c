"""Errors for operations of other libraries that would be wrong on shards.

The code of these libraries cannot be changed. So the checks are in methods of the model, in an attribute that a library reads, and in
the optimizer's step.
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
_REMEDIES = {
    "resize_token_embeddings": _BEFORE,  # of transformers; it puts new parameters into the model
    "merge_and_unload": _MERGE,  # the last three are of peft, and write to parameters
    "merge_adapter": _MERGE,
    "unmerge_adapter": _MERGE,
}


def refuse_methods(module: nn.Module, *, is_cut: bool) -> None:
    """Let methods that replace parameters raise TypeError in all parts of a module; with `is_cut`, also methods that write to them."""
    for path, part in module.named_modules():
        for method, remedy in _REMEDIES.items():
            if not callable(getattr(type(part), method, None)) or (remedy is _MERGE and not is_cut):
                continue
            param = next((name for name, _ in part.named_parameters(path)), None)
            if param is not None:
                text = f"{method}: {param} is sharded, and each rank has only its own rows; {remedy}"
                setattr(part, method, partial(_refuse, text))


def _refuse(text: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise TypeError(text)


def refuse_wrapping(module: nn.Module) -> NoReturn:
    """TypeError if torch's DistributedDataParallel, which accelerate and `transformers.Trainer` use, reads its attribute of a model.

    Other readers, such as `inspect.getmembers`, get an AttributeError.
    """
    if sys._getframe(2).f_globals.get("__name__") != "torch.nn.parallel.distributed":
        raise AttributeError("_ddp_params_and_buffers_to_ignore")
    name = next((name for name, _ in module.named_parameters()), "a parameter")
    raise TypeError(
        f"DistributedDataParallel: {name} is sharded by fully_shard, whose backward averages the gradients; train the model "
        "without a wrapper, in your own loop (examples/shard_your_model.py) in place of transformers.Trainer or accelerate"
    )


def check_caller(shard: torch.Tensor) -> None:
    """TypeError if `transformers.Trainer` is about to step an optimizer of shards, including `shard`."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") == "transformers.trainer":
            param = find(id(shard))
            raise TypeError(
                f"transformers.Trainer does not know that {'a parameter' if param is None else param.name} is sharded: it would train "
                "each rank on the same batches, and save only this rank's rows; train in your own loop (examples/shard_your_model.py)"
            )
