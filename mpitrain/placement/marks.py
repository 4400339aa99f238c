"""The marks that sharding leaves on parameters.

Optimizers, initialisers, checkpoints and the next call of `fully_shard` get a bare parameter. A mark tells them the parameter's role.
The marks are attributes, because an attribute lives as long as its parameter.
"""

from typing import TYPE_CHECKING, Any

from torch import nn

from mpitrain.placement.boxes import ShardBox
from mpitrain.placement.spread import mark_spread, replaced

if TYPE_CHECKING:
    from mpitrain.sharding.ranks import DataParallelRanks


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


def mark_ignored(
    param: nn.Parameter, name: str, ranks: "DataParallelRanks", *, is_ordered: bool, is_apart: bool = False
) -> None:
    """Mark a parameter that no unit may take, also not the unit of a module around the one that ignores it.

    Nothing keeps it the same on ranks with different data. In norms that of the first of them counts, so that all ranks clip alike.
    `is_apart`: copies of the model train apart, so each has a norm of its own.
    """
    param._ignored_by_sharding = True  # type: ignore[attr-defined]
    mark_spread(
        param, tuple(param.shape), name=name, everyone=ranks.everyone, holders=ranks.tensor, alike=ranks.tensor,
        summed=ranks.holders if is_apart else ranks.all_holders,
        counts=(ranks.within if is_apart else ranks.data_parallel).rank == 0, is_ordered=is_ordered,
    )  # fmt: skip


def is_ignored(param: nn.Parameter) -> bool:
    """Whether no unit may take this parameter."""
    return getattr(param, "_ignored_by_sharding", False)
