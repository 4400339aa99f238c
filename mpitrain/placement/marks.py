"""The marks of parameters: how a parameter is spread over ranks, whether it is a shard, what it has replaced, and whether sharding
ignores it.

Optimizers, initialisers, checkpoints, torch's functions and the next call of `fully_shard` get bare parameters or gradients. A mark
tells what a parameter is a part of. Each kind of parallelism marks the parameters that it makes: a shard of a parameter that
`tensor_parallel` has cut has the mark of `fully_shard`.
"""

import weakref
from collections.abc import Iterable, MutableMapping
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from collectives import Communicator
from mpitrain.placement.part_tensor import refuse
from mpitrain.placement.parts import (
    Box,
    ParameterPart,
    ParameterPiece,
    ShardBox,
    mark_part,
    part_of,
    row_dim,
    watch_gradient,
)

if TYPE_CHECKING:
    from mpitrain.sharding.ranks import DataParallelRanks


class Spread(NamedTuple):
    """What a parameter of this rank is a part of."""

    name: str
    """Its name in the model, or in the part of the model that was sharded last: the same on the ranks of `holders`."""
    full_shape: tuple[int, ...]
    """The shape of the whole parameter, in the plain model."""
    everyone: Communicator
    """All ranks that train the model: they take, or skip, each step together."""
    holders: Communicator
    """The ranks that hold the parts of one copy. Other stages of a pipeline have other parameters."""
    alike: Communicator
    """The holders in all copies that have the same values and gradients: only `holders`, if copies train apart."""
    summed: Communicator
    """The ranks whose elements make a sum over the model, such as a norm, in this stage: `holders`, or more for a whole parameter."""
    counts: bool
    """Whether the elements of this rank count in such a sum: of ranks with different data that hold the same ones only the first do."""
    offset: tuple[int, ...]
    """Where the parameter begins in the parameter that is sharded: in the plain model's, or in this rank's part of that."""
    is_ordered: bool = False
    """Whether every sum over the elements, and every update of an element, must not depend on the cut into shards."""
    is_cut: bool = False
    """Whether some of `holders` hold less than the whole, although this rank may hold all of it: the same on all of them."""


class SumRanks(NamedTuple):
    """The ranks of a sum over a model's elements: first it goes over those of one stage, `over`, then over the stages of a pipeline.

    Two sums, because a stage may have parameters of a kind that the other stages have not.
    """

    over: Communicator | None
    stages: Communicator | None


# Not an attribute of the parameter, because a communicator cannot be pickled.
_marks: "MutableMapping[torch.Tensor, Spread]" = WeakTensorKeyDictionary()


def mark_spread(
    param: nn.Parameter,
    full_shape: tuple[int, ...],
    *,
    name: str,
    everyone: Communicator,
    holders: Communicator,
    alike: Communicator,
    summed: Communicator | None = None,
    counts: bool = True,
    offset: tuple[int, ...] | None = None,
    is_ordered: bool = False,
    is_cut: bool = False,
) -> None:
    """`param` is a part of a parameter of `full_shape`. If `tensor_parallel` has cut it, the shape is that of the uncut parameter.

    The groups of ranks (`summed`: None is `holders`), `counts`, `is_ordered` and `is_cut`: see `Spread`. `offset`: of a shard in the
    parameter that is sharded; None: its beginning.
    """
    part = part_of(param)
    shape = part.full_shape if part is not None and part.full_shape else full_shape
    _marks[param] = Spread(
        name, tuple(shape), everyone, holders, alike, summed or holders, counts, offset or (0,) * param.ndim, is_ordered,
        is_cut,
    )  # fmt: skip


def mark_renamed(param: torch.Tensor, name: str) -> None:
    """`param` has another name now: a module around the one that was sharded before has been sharded, too."""
    _marks[param] = _marks[param]._replace(name=name)


def mark_apart(param: torch.Tensor) -> None:
    """The copies of the model that `param` is in train apart from now on: their values and gradients differ."""
    if (spread := _marks.get(param)) is not None:
        _marks[param] = spread._replace(alike=spread.holders)


def pieces_of(param: torch.Tensor) -> list[ParameterPiece]:
    """The boxes of the whole parameter that this rank holds in `param`, each with its place there. Empty boxes are left out."""
    part, spread = part_of(param), _marks.get(param)
    offset = (0,) * param.ndim if spread is None else spread.offset
    if part is not None:
        return part.within(offset, param.shape)
    return [ParameterPiece((slice(None),) * param.ndim, Box(offset, tuple(param.shape)))] if param.numel() else []


def is_ordered(param: torch.Tensor) -> bool:
    """Whether sums over a parameter have the same bits at any number of ranks."""
    return (spread := _marks.get(param)) is not None and spread.is_ordered


def rows_of(param: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, of the shape of `param`, as a matrix of the rows between which the whole parameter is sharded."""
    spread = _marks.get(param)
    dim = row_dim(param.shape if spread is None else spread.full_shape)
    return tensor.reshape(-1, max(prod(tensor.shape[dim + 1 :]), 1))


def mark_cut(param: nn.Parameter, name: str, part: ParameterPart) -> None:
    """`param` is this rank's `part` of the parameter `name`, not sharded so far. Its gradient is a sum if the part says so.

    A copy of the parameter has the same mark, and `ckpt.save` refuses the parameter in place of the whole one.
    """
    mark_part(param, part)
    model_ranks = part.model_ranks
    over = part.over
    mark_spread(param, part.full_shape, name=name, everyone=model_ranks, holders=over, alike=over, is_cut=part.is_cut)
    watch_gradient(param)
    if part.is_cut:
        param.refuse_as_whole = partial(refuse, name, param.shape, part.full_shape)  # type: ignore[attr-defined]
    # torch's copy has no attributes and no hooks. The weak reference: a parameter's memory is freed with its last use.
    param.__deepcopy__ = partial(_copied, weakref.ref(param), name, part)  # type: ignore[method-assign]


def _copied(of: "weakref.ref[nn.Parameter]", name: str, part: ParameterPart, memo: dict[int, Any]) -> nn.Parameter:
    """`copy.deepcopy` of a marked parameter."""
    param = of()
    assert param is not None
    made = nn.Parameter.__deepcopy__(param, memo)
    mark_cut(made, name, part)
    return made


def spread_of(param: torch.Tensor) -> Spread | None:
    """The mark of a parameter; None for a parameter that is the same on every rank, or of a plain model."""
    return _marks.get(param)


def all_spread() -> list[tuple[torch.Tensor, Spread]]:
    """Every marked parameter of this process, with its mark."""
    return list(_marks.items())


def first_cut(params: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """The first of the parameters that some rank does not hold as a whole. All ranks that hold them find one, or none."""
    return next((param for param in params if (spread := spread_of(param)) is not None and spread.is_cut), None)


def counts_in_norms(param: torch.Tensor) -> bool:
    """Whether this rank counts its part of a parameter among the `holders`: of ranks that hold the same part only the first does."""
    part = part_of(param)
    return part is None or part.is_first


def sum_ranks_of(param: torch.Tensor) -> SumRanks | None:
    """The ranks of a sum over the elements of a parameter and of others; None for one that is not marked: its elements are here."""
    if (spread := _marks.get(param)) is None:
        return None
    return SumRanks(spread.summed, None if (part := part_of(param)) is None else part.stages)


def counts_in_sums(param: torch.Tensor) -> bool:
    """Whether this rank counts its elements of a parameter in a sum over `sum_ranks_of`, in which each element counts once."""
    return counts_in_norms(param) and ((spread := _marks.get(param)) is None or spread.counts)


def everyone_of(params: Iterable[torch.Tensor]) -> list[Communicator]:
    """The ranks with which this one takes each step of an optimizer of `params`; the same order on all ranks."""
    found = [spread.everyone for param in params if (spread := spread_of(param)) is not None]
    return [comm for comm in dict.fromkeys(found) if comm.size > 1]


class Replaced(NamedTuple):
    """A parameter, called `name`, in whose place function `by` has put another."""

    name: str
    by: str


def mark_replaced(param: nn.Parameter, name: str, by: str) -> None:
    """The function `by` has put another parameter in the place of `param`, which was called `name`."""
    param.replaced_in_model = Replaced(name, by)  # type: ignore[attr-defined]


def replaced(param: torch.Tensor) -> Replaced | None:
    """What has replaced a parameter in its model; None for one that is still there."""
    return getattr(param, "replaced_in_model", None)


# Marks of `fully_shard`. They are attributes, because an attribute lives as long as its parameter.


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
