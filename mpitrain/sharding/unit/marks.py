"""The marks that sharding leaves on parameters.

Other code gets a bare parameter: an optimizer, an initialiser, a checkpoint, the next call of `fully_shard`. The marks tell it what the
parameter is. An attribute goes with its parameter; a table by identity would not, and tensors have no hash by identity for a weak one.
"""

from typing import Any

from torch import nn

from mpitrain.sharding.unit.layout import ShardBox


def mark_shard(param: nn.Parameter, box: ShardBox) -> None:
    """`param` is a shard, or a full parameter, and this rank holds `box`."""
    param.shard_box = box  # type: ignore[attr-defined]


def box_of(param: Any) -> ShardBox | None:
    """This rank's box of a sharded parameter; None for anything else."""
    return getattr(param, "shard_box", None)


def mark_replaced(param: nn.Parameter, name: str) -> None:
    """`fully_shard` puts two others in the place of this parameter, which was called `name`."""
    param._sharded_as = name  # type: ignore[attr-defined]


def name_before(param: Any) -> str | None:
    """The name of a parameter that `fully_shard` has replaced; None for any other."""
    return getattr(param, "_sharded_as", None)


def mark_ignored(param: nn.Parameter) -> None:
    """No unit takes this parameter, also none of a module around the one that was told to ignore it."""
    param._ignored_by_sharding = True  # type: ignore[attr-defined]


def is_ignored(param: nn.Parameter) -> bool:
    """Whether no unit takes this parameter."""
    return getattr(param, "_ignored_by_sharding", False)
