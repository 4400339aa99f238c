"""Errors for operations of other libraries that would be wrong on shards.

The code of these libraries cannot be changed. So the checks are in methods of the model (methods.py), in an attribute that a library
reads, and in the optimizer's step.
"""

import sys
from typing import NoReturn

import torch
from torch import nn

from mpitrain.sharding.unit.unit import find


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
