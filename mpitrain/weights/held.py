"""The boxes of a model's tensors that a rank holds, in the form of `ckpt.save` and `ckpt.load`."""

from typing import Any

import torch
from torch import nn

import ckpt
from mpitrain.placement.parts import ParameterPart, part_of
from mpitrain.sharding.ranks import SHARD
from mpitrain.sharding.unit.parameter import ShardedParameter
from mpitrain.sharding.unit.unit import params_by_shard
from mpitrain.weights.targets import is_copy_of


class HeldTensors:
    """Makes boxes for `ckpt` of the tensors that belong to a model's parameters.

    `is_saved`: boxes that another rank saves, because it holds a copy of this shard, are empty.
    """

    def __init__(self, model: nn.Module, *, is_saved: bool) -> None:
        self._model, self._is_saved, self._sharded = model, is_saved, params_by_shard(model)

    def __call__(self, value: torch.Tensor, param: nn.Parameter | None) -> Any:
        """`value`, which belongs to `param`: as a box if it has the shard's shape, else as a tensor that all ranks share."""
        data = value.detach()
        owner, part = (None, None) if param is None else (self._sharded.get(param), part_of(param))
        if (owner is None and part is None) or param is None or value.shape != param.shape:
            return data
        is_left_out = self._is_saved and self._is_copy(owner, part)
        if owner is not None and not owner.full.shape:
            return ckpt.Shard(data.view(()) if data.numel() and not is_left_out else data[:0], (), ())
        if part is None:
            assert owner is not None
            return ckpt.Shard(
                data[:0] if is_left_out else data, owner.box.full_shape, owner.box.offset, _axes(owner, part)
            )
        if not part.full_shape:
            return data
        offset = (0,) * data.ndim if owner is None else owner.box.offset
        found = [] if is_left_out else part.within(offset, data.shape)
        axes = _axes(owner, part)
        if not found:
            return ckpt.Shard(data.new_empty((0,) * data.ndim), part.full_shape, (0,) * data.ndim, axes)
        return [ckpt.Shard(data[place], part.full_shape, box.offset, axes) for place, box in found]

    def _is_copy(self, owner: ShardedParameter | None, part: ParameterPart | None) -> bool:
        return is_copy_of(self._model, owner, part)


def of_one_rank(value: torch.Tensor, *, is_mine: bool) -> Any:
    """A tensor that several ranks hold whole, so that one of them saves it."""
    data = value if is_mine else value.reshape(-1)[:0].reshape((0,) * value.ndim or (0,))
    return ckpt.Shard(data, value.shape, (0,) * value.ndim)


class HeldByCopy(HeldTensors):
    """The same of tensors that each copy of the model has of its own: they get one more dimension in front, with a row for each copy.

    `num_rows`: the number of copies; `row`: of this copy, None if it has none.
    """

    def __init__(self, model: nn.Module, *, is_saved: bool, num_rows: int, row: int | None) -> None:
        super().__init__(model, is_saved=is_saved)
        self._num_rows, self._row = num_rows, row

    def __call__(self, value: torch.Tensor, param: nn.Parameter | None) -> Any:
        """`value`, which has the shape of `param`, a shard."""
        found = super().__call__(value, param)
        shards = found if isinstance(found, list) else [found]
        made = [self._with_row(shard) for shard in shards]
        return made if isinstance(found, list) else made[0]

    def _with_row(self, shard: ckpt.Shard) -> ckpt.Shard:
        shape, axes = (self._num_rows, *shard.shape), (None, *(shard.axes or (None,) * len(shard.shape)))
        if self._row is None or not shard.data.numel():
            return ckpt.Shard(shard.data.new_empty((0,) * len(shape)), shape, (0,) * len(shape), axes)
        return ckpt.Shard(shard.data[None], shape, (self._row, *shard.offset), axes)

    def _is_copy(self, owner: ShardedParameter | None, part: ParameterPart | None) -> bool:
        """Whether a rank of the same copy saves the same elements."""
        return (part is not None and not part.is_first) or (owner is not None and not owner.ranks.is_first_within)


def _axes(owner: ShardedParameter | None, part: ParameterPart | None) -> list[str | None]:
    """The axes of the mesh along which each dimension of a parameter is cut."""
    shape = owner.box.full_shape if owner is not None else part.shape  # type: ignore[union-attr]
    rows = next((dim for dim, n in enumerate(shape) if n > 1), 0)
    axes: list[list[str]] = [[] for _ in shape]
    if part is not None and part.is_cut:
        axes[part.dim].append("tp")
    if owner is not None and owner.ranks.shard.size > 1:
        axes[rows].append(SHARD[0])
    return [",".join(names) or None for names in axes]
