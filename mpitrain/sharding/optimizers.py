"""Before an optimizer's step: nobody reads the shards any more, and the step does on shards what it would do on whole parameters."""

import functools
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mpitrain.sharding.fences import finish_forwards
from mpitrain.sharding.reductions import check_reduced

# By name, as most live in packages of their own. They take norms, means or products of a whole matrix, or of all parameters.
NOT_ELEMENTWISE = frozenset(
    {"Adafactor", "CAME", "DistributedShampoo", "GaLoreAdamW", "KFAC", "LAMB", "LARS", "LBFGS", "Lamb", "Lars", "Muon"}
    | {"SM3", "SOAP", "Shampoo"}
)

_checked: "weakref.WeakKeyDictionary[torch.optim.Optimizer, int]" = weakref.WeakKeyDictionary()


@functools.cache
def watch_optimizers() -> None:
    """From now on look at every optimizer before its first step, and whenever it has got parameters since."""
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    finish_forwards()
    check_reduced(
        (param for group in optimizer.param_groups for param in group["params"]), f"{type(optimizer).__name__}.step"
    )
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if _checked.get(optimizer) == count:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        if hasattr(param, "_sharded_as") and not hasattr(param, "shard_box"):
            raise RuntimeError(
                f"this {type(optimizer).__name__} holds {param._sharded_as} as it was before fully_shard, so it would train nothing; "
                "make the optimizer after fully_shard, from model.parameters()"
            )
    kinds = {kind.__name__ for kind in type(optimizer).__mro__}
    cut = next((param for param in params if _is_cut(param)), None)
    if cut is not None and kinds & NOT_ELEMENTWISE:
        raise TypeError(
            f"{type(optimizer).__name__} looks at whole matrices, and this rank holds {tuple(cut.shape)} of one of shape "
            f"{cut.shard_box.full_shape}; take an element-wise optimizer (SGD, Adam, AdamW), or stage=0, which cuts nothing"
        )
    _checked[optimizer] = count


def _is_cut(param: torch.Tensor) -> bool:
    box = getattr(param, "shard_box", None)
    return box is not None and tuple(box.shape) != tuple(box.full_shape)
