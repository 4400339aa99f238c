"""The tensors that a rank holds, each with the rows that it is of the whole tensor."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from mpitrain.job.health.pieces import Boxes, TensorRows
from mpitrain.placement.parts import ParameterPart, part_of
from mpitrain.sharding import sharded_over
from mpitrain.sharding.unit.flat import FlatParameters
from mpitrain.sharding.unit.parameter import ShardedParameter
from mpitrain.sharding.unit.unit import diloco_of, params_by_shard, units_of


@dataclass(frozen=True, eq=False)
class Holding:
    """A tensor of this rank, and its rows."""

    rows: TensorRows
    tensor: torch.Tensor
    dim: int = 0
    """The dimension of the rows."""
    is_counted: bool = True
    """Whether the tensor has rows; a number that belongs to a whole parameter (Adam's step) has none."""

    def values(self, begin: int, end: int) -> torch.Tensor:
        """The values of rows within the holding's rows."""
        data = self.tensor.detach()
        if not self.is_counted or (begin, end) == (self.rows.begin, self.rows.end):
            return data
        return data.narrow(self.dim, begin - self.rows.begin, end - begin)


def at_rest(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Holding]:
    """This rank's shards of the parameters, and the optimizer's state: what no one writes between two steps of the optimizer.

    In local steps the copies of the model differ, so the names say of which copy a tensor is. All copies have the same outer state.
    """
    diloco = diloco_of(model)
    of_copy = "" if diloco is None else diloco.label
    outer = (
        {"outer parameters": diloco.outer, "outer momentum": diloco.momentum} if diloco is not None and of_copy else {}
    )
    names = {param: name for name, param in model.named_parameters()}
    sharded, over = params_by_shard(model), sharded_over(model)
    found = []
    for param, name in names.items():
        owner, part = sharded.get(param), part_of(param)
        if owner is None and part is None and over is not None:
            continue  # ignored by fully_shard: each rank's own
        shape, of, begin = _place(param, owner, part)
        dim = _dim(shape)
        end = begin + (param.shape[dim] if param.shape else 1)
        found.append(Holding(TensorRows(f"model/{name}{of_copy}", of, begin, end), param, dim, bool(param.shape)))
        for kind, values in outer.items():
            if name in values:
                found.append(
                    Holding(TensorRows(f"{kind} of {name}", of, begin, end), values[name], dim, bool(param.shape))
                )
        for key, value in optimizer.state.get(param, {}).items():
            if not isinstance(value, torch.Tensor):
                continue
            label = f"optimizer/{key}/{name}{of_copy}"
            if value.shape == param.shape:
                found.append(Holding(TensorRows(label, of, begin, end), value, dim, bool(value.shape)))
            else:
                found.append(Holding(TensorRows(label, (), 0, 1), value, is_counted=False))
    return found


def full_copies(model: nn.Module) -> list[Holding]:
    """The full parameters that stay in this rank's memory beside its shards, as the last forward and backward used them.

    Of a copy that the ranks of a node share each of these ranks has a part of the rows. Left out are copies that are nothing but this
    rank's shards, and those that are freed after use.
    """
    diloco = diloco_of(model)
    of_copy = "" if diloco is None else diloco.label
    names = {param: name for name, param in model.named_parameters()}
    found: list[Holding] = []
    for unit in units_of(model):
        for flat in unit.flats:
            for index, param in enumerate(flat.params):
                if param.shard in names:
                    found += _copies_of(flat, index, param, names[param.shard] + of_copy)
    return found


def _copies_of(flat: FlatParameters, index: int, param: ShardedParameter, name: str) -> Iterator[Holding]:
    storage, shard = flat.storage, flat.ranks.shard
    is_own = storage.in_place and (shard.size == 1 or (storage.kind == "resident" and shard.num_nodes == 1))
    if not storage.lasts or is_own:
        return
    shape, of, _ = _place(param.full, None, part_of(param.shard))
    dim = _dim(shape)
    ranges = [(0, shape[dim])]
    if storage.kind == "resident":
        boxes = [storage.layout.box(index, rank) for rank in range(shard.node.rank, shard.size, shard.node.size)]
        ranges = [(box.offset[dim], box.offset[dim] + box.shape[dim]) for box in boxes if box.shape[dim]]
    full = param.full.detach().view(shape)
    for begin, end in ranges:
        yield Holding(TensorRows(f"copy of model/{name}", of, begin, end), full.narrow(dim, begin, end - begin), dim)


def constants(model: nn.Module, versions: dict[str, int], *, data: int) -> list[Holding]:
    """The buffers that no one has written since the first call with these `versions`, which it fills: tables of positions, masks.

    The first forward gives all ranks of a data-parallel group, which has the number `data`, the buffers of its first rank. A buffer
    that is written later, such as a running mean, is each rank's own.
    """
    found = []
    for name, buffer in model.named_buffers():
        if buffer.is_meta or buffer.layout != torch.strided or not buffer.numel():
            continue
        if versions.setdefault(name, buffer._version) == buffer._version:
            of = (((data,), tuple(buffer.shape)),)  # ranks with other parts of the model may have other values
            found.append(Holding(TensorRows(f"buffer/{name}", of, 0, 1), buffer, is_counted=False))
    return found


def generators(seed_of: int, device: torch.device) -> list[Holding]:
    """Digests of the states of torch's generators. Ranks with the same `seed_of` draw the same numbers.

    A state has counters: one falls as another rises, and a sum would not change.
    """
    states = {"host": torch.get_rng_state()}
    if device.type == "cuda":
        states["device"] = torch.cuda.get_rng_state(device)
    return [
        Holding(
            TensorRows(f"torch's generator of the {where}", (((seed_of,), ()),), 0, 1), _digest(state), is_counted=False
        )
        for where, state in states.items()
    ]


def hyperparameters(optimizer: torch.optim.Optimizer) -> str:
    """The settings of an optimizer's groups, such as the learning rate, one line per group."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return "\n".join(map(repr, groups))


def _digest(state: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(
        bytearray(hashlib.blake2b(state.numpy().tobytes(), digest_size=8).digest()), dtype=torch.int64
    )


def _place(
    param: torch.Tensor, owner: ShardedParameter | None, part: ParameterPart | None
) -> tuple[tuple[int, ...], Boxes, int]:
    """The shape of this rank's part of the whole, the boxes of the whole that make it, and the first of the rows in `param`."""
    shape = tuple(param.shape) if owner is None else owner.box.full_shape
    shape = shape or (1,)
    of: Boxes = (((0,) * len(shape), shape),)
    if part is not None and part.full_shape:
        of = tuple((tuple(box.offset), tuple(box.shape)) for box in part.boxes)
    return shape, of, 0 if owner is None else owner.box.offset[_dim(shape)]


def _dim(shape: tuple[int, ...]) -> int:
    return next((d for d, length in enumerate(shape) if length > 1), 0)
