"""A watch over the operations of a forward: they neither read freed memory and shards nor write full parameters.

Nothing else sees a view that has left its module in an attribute, a list or a closure, a parameter of a part that is read without a
call of the part, as by nn.MultiheadAttention, and a write through `param.data`. An operation takes a few us more, so only the first
forwards are watched: see `TrainingStep`.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import arg_tree_leaves

from mpitrain.sharding.step.changes import REMEDY
from mpitrain.sharding.step.checks.reach import owner_of, used_outside
from mpitrain.sharding.unit.flat import FlatParameters
from mpitrain.sharding.unit.parameter import ShardedParameter
from mpitrain.sharding.unit.unit import Unit, UnitState, kind_of
from mpitrain.torch_glue.torch_internals import storage_of


class AccessWatch(TorchDispatchMode):
    """In the block: RuntimeError before an operation that reads freed memory or cut shards of these units, or writes their full
    parameters."""

    supports_higher_order_operators = True  # such as flex_attention, which torch would refuse under this mode

    def __init__(self, units: Sequence[Unit], root: nn.Module) -> None:
        super().__init__()
        self._root = root
        self._found = {storage_of(flat.storage.full_buffer): (unit, flat) for unit in units for flat in unit.flats}
        self._shards = {
            storage_of(flat.params[0].shard): flat
            for unit in units
            if not unit.lasts and unit.ranks.shard.size > 1
            for flat in unit.flats
        }

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Modules are compiled as without the watch."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not (getattr(func, "is_view", False) or str(func).endswith(_WITHOUT_VALUES)):
            for tensor in arg_tree_leaves(*args, **kwargs):
                self._check_read(tensor)
        for tensor in _written(func, args, kwargs):
            self._check_write(tensor)
        return func(*args, **kwargs)

    def _check_read(self, tensor: Any) -> None:
        cut = self._shards.get(storage_of(tensor)) if isinstance(tensor, torch.Tensor) else None
        if cut is not None and not cut.is_filling:
            raise RuntimeError(used_outside(_shown_as(cut, tensor), self._root))
        _, flat = self._of(tensor)
        if flat is None or not tensor.numel() or tensor.untyped_storage().size():
            return
        param = _param_of(flat, tensor)
        name, module = owner_of(param, self._root)
        raise RuntimeError(
            f"parameter {param.name}, or a view of it, was kept after the forward of {name} (a {kind_of(module).__name__}), which "
            "frees its memory, and read; keep a copy (param.clone(), through which gradients flow); or pass storage='resident'; or "
            "call the model within `with mpitrain.unshard(model):`"
        )

    def _check_write(self, tensor: Any) -> None:
        unit, flat = self._of(tensor)
        if flat is not None and unit.state is UnitState.UNSHARDED:  # in other states they are filled
            raise RuntimeError(
                f"parameter {_param_of(flat, tensor).name} is written in a forward. It is not damaged. {REMEDY}"
            )

    def _of(self, tensor: Any) -> tuple[Any, FlatParameters | None]:
        return self._found.get(storage_of(tensor), (None, None)) if isinstance(tensor, torch.Tensor) else (None, None)


_WITHOUT_VALUES = ("_like.default", "new_empty.default", "new_zeros.default", "new_ones.default", "new_full.default")
"""Operations that read only shapes, beside those that make views."""


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments that an operation writes."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from value if isinstance(value, list | tuple) else (value,)


def _param_of(flat: FlatParameters, view: torch.Tensor) -> ShardedParameter:
    start = view.storage_offset() * view.itemsize // flat.storage.full_buffer.itemsize
    within = (p for p, its in zip(flat.params, flat.layout.extents, strict=True) if its.start <= start < its.stop)
    return next(within, flat.params[0])


def _shown_as(flat: FlatParameters, rows: torch.Tensor) -> ShardedParameter:
    """The parameter whose shard `rows` are, or are a view of. Shards without rows begin at one place."""
    views = (param for param in flat.params if rows is param.shard or rows._base is param.shard)
    begins = (param for param in flat.params if param.shard.storage_offset() == rows.storage_offset())
    return next(views, None) or next(begins, flat.params[0])
