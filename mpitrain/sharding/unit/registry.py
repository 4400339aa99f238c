"""Look-ups: the unit of a module, the units of a model, and the parameter of a shard."""

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mpitrain.sharding.ranks import DataParallelRanks
from mpitrain.sharding.slices.rounds import Slices
from mpitrain.sharding.unit.parameter import ShardedParameter
from mpitrain.sharding.unit.unit import Unit

if TYPE_CHECKING:
    from mpitrain.sharding.compression.compression import Compression

_units: "weakref.WeakSet[Unit]" = weakref.WeakSet()
_around: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]]" = weakref.WeakKeyDictionary()


def enter(unit: Unit) -> None:
    """Add a unit to those of this process. The registry does not keep the unit alive."""
    _units.add(unit)


def enter_parts(module: nn.Module) -> list[nn.Module]:
    """Record the parts of a module that is sharded, up to sharded ones. Returns the module and the plain ones of these parts."""
    plain = [module]
    around = weakref.ref(module)
    for part in plain:  # which grows
        for child in part.children():
            if around_of(child) is None:
                _around[child] = around
                if unit_of(child) is None:
                    plain.append(child)
    return plain


def around_of(module: nn.Module) -> nn.Module | None:
    """The innermost sharded module that has `module` as a part; None if there is none, or not any more."""
    found = _around.get(module)
    return None if found is None else found()


def root_of(module: nn.Module) -> nn.Module:
    """The outermost sharded module around a module; the module itself if there is none."""
    while (around := around_of(module)) is not None:
        module = around
    return module


def all_sharded() -> Iterator[ShardedParameter]:
    """Every sharded parameter of this process. The order is not the same on all ranks."""
    for unit in list(_units):
        yield from unit.params


def find(key: int) -> ShardedParameter | None:
    """The parameter whose shard has the `id` of `key`; None if there is none."""
    return next((param for param in all_sharded() if id(param.shard) == key), None)


def unit_of(module: nn.Module) -> Unit | None:
    """The unit of a sharded module; None for any other module."""
    return vars(module).get("_unit")


def kind_of(module: nn.Module) -> type[nn.Module]:
    """The class that a sharded module had before `fully_shard`; the class of any other module."""
    return type(module).__mro__[0 if unit_of(module) is None else 2]


def units_of(model: nn.Module) -> list[Unit]:
    """The units of all sharded modules of a model, in the order of the modules."""
    return [unit for unit in map(unit_of, model.modules()) if unit is not None]


def sharded_params(model: nn.Module) -> Iterator[ShardedParameter]:
    """Every sharded parameter of a model, in the order of the modules."""
    for unit in units_of(model):
        yield from unit.params


def params_by_shard(model: nn.Module) -> dict[torch.Tensor, ShardedParameter]:
    """Every sharded parameter of a model by its shard."""
    return {param.shard: param for param in sharded_params(model)}


def compression_of(model: nn.Module) -> "Compression | None":
    """The compression of a model's gradients; None without one."""
    return next((unit.compression for unit in units_of(model) if unit.compression is not None), None)


def diloco_of(model: nn.Module) -> Any:
    """The `DiLoCo` of a model with local steps; None without them."""
    return next((unit.diloco for unit in units_of(model) if unit.diloco is not None), None)


def slices_of(model: nn.Module) -> Slices | None:
    """The slices of a global batch of a model; None without them."""
    return next((unit.slices for unit in units_of(model)), None)


def sharded_over(model: nn.Module) -> DataParallelRanks | None:
    """The ranks over which a model is sharded; None for a model that is not sharded."""
    return next((unit.ranks for unit in units_of(model)), None)
