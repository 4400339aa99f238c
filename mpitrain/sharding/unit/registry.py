"""All sharded modules of this process: who has nothing but a parameter, or its gradient, finds here whose it is."""

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from mpitrain.sharding.unit.ranks import Ranks

if TYPE_CHECKING:
    from mpitrain.sharding.step.state import State
    from mpitrain.sharding.unit.unit import Sharded

_states: "weakref.WeakSet[State]" = weakref.WeakSet()


def enter(state: "State") -> None:
    """A module is sharded; it is forgotten with its `state`."""
    _states.add(state)


def all_sharded() -> Iterator[tuple["Sharded", Ranks]]:
    """Every sharded parameter, and the ranks that it is sharded over. In no order that other ranks would have, too."""
    for state in list(_states):
        for unit in state.units:
            for param in unit.params:
                yield param, state.ranks


def find(shard: torch.Tensor | int) -> "Sharded | None":
    """The parameter of a shard, or of the identity of one; None if it is no shard."""
    key = shard if isinstance(shard, int) else id(shard)
    return next((param for param, _ in all_sharded() if id(param.shard) == key), None)
