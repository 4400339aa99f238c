"""All units of this process: code that has nothing but a parameter, or its gradient, finds here whose it is."""

import weakref
from collections.abc import Iterator

import torch

from mpitrain.sharding.unit.parameter import ShardedParameter
from mpitrain.sharding.unit.ranks import Ranks
from mpitrain.sharding.unit.unit import Unit

_units: "weakref.WeakSet[Unit]" = weakref.WeakSet()


def enter(unit: Unit) -> None:
    """A module is sharded. The entry goes with its unit."""
    _units.add(unit)


def all_sharded() -> Iterator[tuple[ShardedParameter, Ranks]]:
    """Every sharded parameter, and the ranks that it is sharded over. In no order that other ranks would have, too."""
    for unit in list(_units):
        for param in unit.params:
            yield param, unit.ranks


def find(shard: torch.Tensor | int) -> ShardedParameter | None:
    """The parameter of a shard, or of the identity of one; None if it is no shard."""
    key = shard if isinstance(shard, int) else id(shard)
    return next((param for param, _ in all_sharded() if id(param.shard) == key), None)
