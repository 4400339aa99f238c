"""The tensors of a model that hold weights: parameters and persistent buffers, whole or as this rank's boxes of them."""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import nn

from ckpt.ranks import Ranks, ranks_of
from ckpt.views import plain
from collectives import Communicator
from mpitrain.placement.parts import Box, ParameterPart, ParameterPiece, part_of, stages_of, tensor_ranks_of
from mpitrain.sharding.buffers import lacks_memory, with_memory
from mpitrain.sharding.module import steps_of
from mpitrain.sharding.step.state import Phase
from mpitrain.sharding.unit.parameter import ShardedParameter
from mpitrain.sharding.unit.unit import UnitState, diloco_of, params_by_shard, sharded_over, units_of
from mpitrain.weights.extra_state import is_extra_state

_CHUNK_BYTES = 16 << 20  # sent at a time


class Target(NamedTuple):
    """A parameter or buffer of a model."""

    names: list[str]  # several names if the tensor is tied
    tensor: torch.Tensor  # this rank's part
    shape: tuple[int, ...]  # shape of the whole tensor
    pieces: Sequence[ParameterPiece] | None = (
        None  # the boxes of the whole in this rank's part; None if each rank has the whole
    )
    is_copy: bool = False  # another rank has the same pieces, and sends them


def targets_of(model: nn.Module) -> list[Target]:
    """All tensors in the order of the model's state dict, each once. An extra state is among them if it is a tensor.

    Of a model in stages those of all stages, the same list on all ranks: a rank has no pieces of a tensor of another stage. Collective.
    """
    found = _own_targets(model)
    stages = stages_of(model.parameters())
    if stages is None or stages.size == 1:
        return found
    mine = {target.names[0]: target for target in found}
    described = [(target.names, target.tensor.dtype, target.shape) for target in found]
    known: dict[str, Target] = {}
    first: dict[str, int] = {}  # the first stage that has the tensor
    for rank, theirs in enumerate(stages.all_gather_object(described)):
        for names, dtype, shape in theirs:
            first.setdefault(names[0], rank)
            before = known.setdefault(names[0], Target([], torch.empty(0, dtype=dtype), shape, []))
            before.names.extend(name for name in names if name not in before.names)
    for name, target in mine.items():
        pieces = target.pieces
        if pieces is None:  # each rank of this stage has the whole
            pieces = [ParameterPiece((slice(None),) * len(target.shape), Box((0,) * len(target.shape), target.shape))]
        known[name] = target._replace(
            names=known[name].names, pieces=pieces, is_copy=target.is_copy or stages.rank != first[name]
        )
    return list(known.values())


def weights_of(model: nn.Module) -> list[Target]:
    """The same to be read: with local steps the outer parameters while the copies differ. Collective."""
    diloco = diloco_of(model)
    outer = diloco.outer if diloco is not None and diloco.is_apart else {}
    return [target._replace(tensor=outer.get(target.names[0], target.tensor)) for target in targets_of(model)]


def _own_targets(model: nn.Module) -> list[Target]:
    sharded = params_by_shard(model)
    params = dict(model.named_parameters(remove_duplicate=False))
    found: dict[int, Target] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        tensor = params.get(name, value)
        if not torch.is_tensor(tensor):
            continue
        if id(tensor) not in found:
            owner, part = sharded.get(tensor), part_of(tensor)
            shape, pieces = tuple(tensor.shape), None
            is_copy = is_copy_of(model, owner, part)
            if part is not None:
                shape = part.full_shape
                pieces = (
                    part.within((0,) * len(shape) if owner is None else owner.box.offset, tensor.shape)
                    if shape
                    else None
                )
            elif owner is not None:
                shape = tuple(owner.full.shape)
                pieces = [
                    ParameterPiece(
                        (slice(None),) * len(shape), Box(owner.box.offset[: len(shape)], owner.box.shape[: len(shape)])
                    )
                ]
            if owner is not None and not shape:  # a scalar's shard is a vector of one element, or of none
                pieces = [ParameterPiece((), Box((), ()))]
            if pieces is not None and not tensor.numel():
                pieces = []
            found[id(tensor)] = Target([], tensor, shape, pieces, is_copy)
        found[id(tensor)].names.append(name)
    return list(found.values())


def is_copy_of(model: nn.Module, owner: ShardedParameter | None, part: ParameterPart | None) -> bool:
    """Whether a rank before this one has the same elements of a parameter, or the same buffer.

    `owner`: its shards; None if `fully_shard` left it alone. `part`: its part; None also for a buffer.
    """
    if part is None and owner is None:
        return not is_first_holder(model)
    if part is not None and not part.is_first:
        return True
    if owner is not None:
        return owner.ranks.replicate.rank > 0
    over = sharded_over(model)
    return over is not None and over.data_parallel.rank > 0


def is_first_holder(model: nn.Module, comm: Communicator | None = None) -> bool:
    """Whether this rank is the first of `holders_of`: it is data rank 0, whose buffers are saved and exported."""
    holders = holders_of(model, comm)
    return holders is None or holders.rank == 0


def holders_of(model: nn.Module, comm: Communicator | None = None) -> Communicator | None:
    """The ranks that have the same stages of the model as this rank. None: this process alone.

    `comm`: the ranks that all hold a model that is not sharded, if there are several.
    """
    over = sharded_over(model)
    return over.all_holders if over is not None else tensor_ranks_of(model.parameters()) or comm


def chunks_on_rank0(
    targets: Sequence[Target], dtypes: Sequence[torch.dtype], comm: Communicator | None
) -> Iterator[torch.Tensor]:
    """On rank 0 the whole tensors, one after the other, in chunks of at most 16 MiB (or one row), in host memory. Collective.

    Tensors without elements have no chunk.

    The other ranks send their boxes meanwhile, and get nothing. `dtypes`: those of the chunks. `comm`: the ranks of the model, or None.
    """
    mine = [[piece.box for piece in target.pieces or () if not target.is_copy] for target in targets]
    held, me = ([mine], 0) if comm is None else (comm.all_gather_object(mine), comm.rank)
    for index, (target, dtype) in enumerate(zip(targets, dtypes, strict=True)):
        dim = next((d for d, length in enumerate(target.shape) if length > 1), 0)
        num_rows = target.shape[dim] if target.shape else 1
        if 0 in target.shape:
            continue
        count = max(_CHUNK_BYTES // max(prod(target.shape) // max(num_rows, 1) * dtype.itemsize, 1), 1)
        for start in range(0, num_rows, count):
            stop = min(start + count, num_rows)
            if target.pieces is None:
                if me == 0:
                    rows = (
                        target.tensor.detach().narrow(dim, start, stop - start)
                        if target.shape
                        else target.tensor.detach()
                    )
                    yield _on_host(rows, dtype)
                continue
            shape = tuple(stop - start if d == dim else n for d, n in enumerate(target.shape))
            chunk = torch.empty(shape if me == 0 else 0, dtype=dtype)
            for owner, of_rank in enumerate(held):
                for number, box in enumerate(of_rank[index]):
                    places = _rows(box, dim, start, stop)
                    if places is None:
                        continue
                    within, in_chunk = places
                    if me == owner:
                        part = target.tensor.detach()[target.pieces[number].place]
                        values = _on_host(part[within] if target.shape else part, dtype)
                        if owner and comm is not None:
                            comm.send(_bytes(values), 0)
                    elif me == 0 and comm is not None:
                        values = torch.empty(chunk[in_chunk].shape, dtype=dtype)
                        comm.recv(_bytes(values), owner)
                    if me == 0:
                        chunk[in_chunk].copy_(values.view(chunk[in_chunk].shape))
            if me == 0:
                yield chunk


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.view(-1).view(torch.uint8)


def _on_host(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return plain(values.to("cpu", dtype))


def _rows(box: Box, dim: int, start: int, stop: int) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """The rows `start` to `stop - 1` of a whole tensor in a box: their place in the box, and in the chunk of these rows."""
    if not box.shape:
        return (), ()
    begin, end = max(box.offset[dim], start), min(box.offset[dim] + box.shape[dim], stop)
    if begin >= end:
        return None
    within = tuple(
        slice(begin - box.offset[d], end - box.offset[d]) if d == dim else slice(None) for d in range(len(box.shape))
    )
    in_chunk = tuple(
        slice(begin - start, end - start) if d == dim else slice(o, o + n)
        for d, (o, n) in enumerate(zip(box.offset, box.shape, strict=True))
    )
    return within, in_chunk


def fill(model: nn.Module, target: Target, read: Callable[[tuple[slice, ...]], torch.Tensor]) -> None:
    """Fill this rank's part of a tensor of `model`. `read(place)`: the values at these indices of the whole tensor."""
    tensor = target.tensor
    if is_extra_state(target.names[0]):  # which `tensor` may be a copy of
        values = read(tuple(slice(0, length) for length in target.shape)).to(tensor.device, tensor.dtype, copy=True)
        for name in target.names:
            model.get_submodule(name.rpartition(".")[0]).set_extra_state(values)
        return
    if lacks_memory(tensor) and not isinstance(tensor, nn.Parameter):
        tensor = with_memory(model, target.names[0])
    if target.pieces is None:
        tensor.detach().copy_(read((slice(None),) * len(target.shape)).view(tensor.shape))
        return
    for place, box in target.pieces:
        there = tensor.detach()[place]
        there.copy_(read(tuple(slice(o, o + n) for o, n in zip(*box, strict=True))).view(there.shape))


def ranks_of_model(model: nn.Module) -> Communicator | None:
    """The ranks that hold a model together; None for a plain model."""
    over = sharded_over(model)
    if over is not None:
        return over.everyone
    return next((part.model_ranks for param in model.parameters() if (part := part_of(param)) is not None), None)


_IN_STEP = "the model is in the middle of a step, or within unshard, where its parameters are full"


def begin(model: nn.Module, doing: str) -> Ranks:
    """Prepare `doing`, which reads or writes the shards: free the full parameters. Returns the ranks of the model. Collective.

    RuntimeError on all ranks in the middle of a step. A model that is not sharded has one rank.
    """
    comm = ranks_of(ranks_of_model(model))
    with comm.together(doing):
        for step in steps_of(model):
            step.before_reads()
            if step.phase is not Phase.IDLE:
                raise RuntimeError(_IN_STEP)
        if any(unit.state is UnitState.COPIED for unit in units_of(model)):
            raise RuntimeError(_IN_STEP)
    for unit in units_of(model):
        unit.reshard()
    return comm
