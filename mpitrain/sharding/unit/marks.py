"""The marks that sharding leaves on parameters.

Optimizers, initialisers, checkpoints and the next call of `fully_shard` get a bare parameter. A mark tells them the parameter's role.
The marks are attributes, because an attribute lives as long as its parameter.
"""

from typing import Any

from torch import nn

from mpitrain.optim.spread import replaced
from mpitrain.sharding.unit.layout import ShardBox


def mark_shard(param: nn.Parameter, box: ShardBox) -> None:
    """Mark `param` as a shard, or as a full parameter, of which this rank holds `box`."""
    param.shard_box = box  # type: ignore[attr-defined]


def box_of(param: Any) -> ShardBox | None:
    """This rank's box of a shard or full parameter; None for any other object."""
    return getattr(param, "shard_box", None)


def name_before(param: Any) -> str | None:
    """The name of a parameter that `fully_shard` has replaced by a shard and a full parameter; None for any other."""
    found = replaced(param)
    return found.name if found is not None and found.by == "fully_shard" else None


def mark_ignored(param: nn.Parameter) -> None:
    """Mark a parameter that no unit may take, also not the unit of a module around the one that ignores it."""
    param._ignored_by_sharding = True  # type: ignore[attr-defined]


def is_ignored(param: nn.Parameter) -> bool:
    """Whether no unit may take this parameter."""
    return getattr(param, "_ignored_by_sharding", False)
