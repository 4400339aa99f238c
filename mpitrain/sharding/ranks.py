"""The groups of ranks: the shard group holds one copy of the model, the replicate group holds copies of one shard.

[Note: wires] Only sums of gradients and gathers of weights are encoded, and only between nodes; norms, flags and messages are exact.
All ranks get the same bits, because the owner of a sum, and of a row, uses the decoded values, too. A group on one node has no wire:
its communicator is the one without a wire, and nothing changes there. Encoded gathers of weights follow ZeRO++ (Wang et al. 2023,
2306.10209), where the shards stay masters in fp32.

[Note: alike] Tensor-parallel ranks hold some parameters alike: norms, biases of row layers, positions, heads of keys that several ranks
share. Each of these ranks averages its own copy over its own data-parallel group, and all must get the same bits. An error of a format
depends on the neighbours in the buffer, with which an element shares a scale, and on the ranks that are on one node, whose sum is
encoded. So these parameters have a flat buffer of their own, and groups that lie differently on the nodes encode nothing.
"""

import logging
import weakref
from functools import cache
from typing import NamedTuple

import collectives
from collectives import Communicator, Mesh
from collectives.codec.formats import FORMATS
from collectives.selection.selector import EXACT
from collectives.selection.wire import AUTO
from mpitrain.placement.axes import group_of

REPLICATE, SHARD, STAGES, TENSOR = ("dp_replicate",), ("dp_shard", "cp"), ("pp",), ("tp",)
"""The axes of a mesh along which a model has copies, along which ZeRO shards a copy (together: the data-parallel group), and along
which `pipeline` and `tensor_parallel` divide the model."""


class WiredGroups(NamedTuple):
    """The communicators of data that may be encoded between nodes: see [Note: wires]. Everything else is exact."""

    shard: Communicator
    """The shard group, for the reduce-scatters of gradients."""
    replicate: Communicator
    """The replicate group, for the all-reduces of gradients."""
    weights: Communicator
    """The shard group, for the all-gathers of weights."""
    within: Communicator
    """`DataParallelRanks.within`, for the all-reduces of gradients in local steps."""
    across: Communicator
    """`DataParallelRanks.across`, for the outer gradients of local steps."""
    encodes_weights: bool = False
    """Whether `weights` encodes. The same on all ranks."""
    is_lossy: bool = False
    """Whether a format below fp32 was asked for, on several nodes. The same on all ranks, also on those whose groups encode nothing."""


class DataParallelRanks(NamedTuple):
    """The groups of ranks that train one model on different data.

    `shard`: the shard group, whose ranks hold the shards of one copy of the model. `replicate`: the replicate group, whose ranks hold
    the same shard of different copies. `data_parallel`: all ranks of all copies. With one copy (ZeRO) the replicate group has only this
    rank. If each rank has a copy (data parallel), the shard group has only this rank.

    `within` x `across` is another division of `data_parallel`: ranks that always train as one, and copies that may train apart (local
    steps). Without a mesh, each rank of stage 0 is such a copy. The two divisions differ only in stage 0 on a mesh.
    """

    data_parallel: Communicator
    shard: Communicator
    replicate: Communicator
    copy: Communicator
    """The ranks that hold one copy of the model: the shard group, and along other axes (tensors, stages) its counterparts."""
    everyone: Communicator
    """All ranks of the mesh."""
    holders: Communicator
    """The ranks of `copy` in this rank's stage of a pipeline: all of `copy`, if the model is not in stages."""
    all_holders: Communicator
    """The ranks of `everyone` in this rank's stage."""
    within: Communicator
    """The ranks of this copy that train on different data: along the axes `dp_shard` and `cp`."""
    across: Communicator
    """The ranks in the same place of the other copies: along the axis `dp_replicate`."""
    tensor: Communicator
    """The ranks of `tensor_parallel`: they have the same data, hold some parameters cut, and the others alike."""
    wired: WiredGroups
    """The groups of gradients and weights. Without a wire below fp32 they are `shard` and `replicate` themselves."""

    @property
    def has_replicas(self) -> bool:
        """Whether there are several copies of the model."""
        return self.replicate.size > 1

    @property
    def is_first_within(self) -> bool:
        """Whether no rank of `within` before this one holds the same shard."""
        return self.shard.size == self.within.size or self.within.rank == 0


def is_within(inner: Communicator, outer: Communicator) -> bool:
    """Whether `outer` has all ranks of `inner`."""
    if inner is outer:
        return True
    group = inner.mpi.Get_group()
    return bool(type(group).Intersection(group, outer.mpi.Get_group()).size == inner.size)


def are_apart(one: Communicator, other: Communicator) -> bool:
    """Whether the two have no rank in common but this one."""
    group = one.mpi.Get_group()
    return bool(type(group).Intersection(group, other.mpi.Get_group()).size == 1)


def data_parallel_ranks(
    mesh: Mesh | Communicator | None, *, whole: bool = False, tensor: Communicator | None = None
) -> DataParallelRanks:
    """The groups of a mesh, or of a communicator (None: the world), over which one copy is sharded. Collective.

    `whole`: each rank holds its own whole copy. `tensor`: the ranks among which `tensor_parallel` has cut the model; None: it is not
    cut. ValueError if the mesh has other axes longer than 1.
    """
    if isinstance(mesh, Mesh):
        known = REPLICATE + SHARD + STAGES + TENSOR
        others = [f"{name}={size}" for name, size in mesh.axes.items() if size > 1 and name not in known]
        if others:
            raise ValueError(
                f"fully_shard: nothing divides a model along mesh axes {', '.join(others)}, so their ranks would train models that "
                f"differ; expected sizes above 1 only of {', '.join(known)}"
            )
        data, replicate, within, alone = (_along(mesh, role) for role in (REPLICATE + SHARD, REPLICATE, SHARD, ()))
        of_copy = TENSOR if whole else SHARD + TENSOR  # in one stage
        everyone, copy, holders = mesh.comm, _along(mesh, of_copy + STAGES), _along(mesh, of_copy)
        all_holders = _along(mesh, REPLICATE + SHARD + TENSOR)
    else:
        data = mesh or collectives.world()
        alone = group_of(data, 1)
        replicate, within = (data, alone) if whole else (alone, data)
        everyone, copy, holders, all_holders = data, within, within, data
    shard, copies = (alone, data) if whole else (within, replicate)
    return DataParallelRanks(
        data_parallel=data, shard=shard, replicate=copies, copy=copy, everyone=everyone, within=within, across=replicate,
        tensor=tensor or alone, holders=holders, all_holders=all_holders,
        wired=WiredGroups(shard=shard, replicate=copies, weights=shard, within=within, across=replicate),
    )  # fmt: skip


def _along(mesh: Mesh, role: tuple[str, ...]) -> Communicator:
    """This rank's group along those axes of `role` that the mesh has."""
    return mesh[tuple(name for name in mesh.axes if name in role)]


# Formats between nodes: communicators with a wire, made once for each group and format.

_log = logging.getLogger("mpitrain")

# Weak keys, as in axes.py: a communicator with a wire is freed with its communicator.
_made: "weakref.WeakKeyDictionary[Communicator, dict[str, Communicator]]" = weakref.WeakKeyDictionary()


def chosen_format(comm: Communicator, wire: str) -> str:
    """The format that `wire` means on all ranks of `comm`: for "auto" what a measurement chooses, which is made once. Collective."""
    if wire != AUTO:
        return wire
    return EXACT if comm.num_nodes == 1 else _made_once(comm, AUTO).wire["network"]


def _encoding(comm: Communicator, wire: str) -> Communicator:
    """A communicator of the same ranks that encodes between nodes; `comm` itself if nothing is to encode. Collective.

    `wire`: a name of `collectives.codec.FORMATS`.
    """
    return comm if comm.num_nodes == 1 or FORMATS[wire].is_exact else _made_once(comm, wire)


def _made_once(comm: Communicator, wire: str) -> Communicator:
    of_comm = _made.setdefault(comm, {})
    if wire not in of_comm:
        of_comm[wire] = comm.with_wire(wire)
    return of_comm[wire]


def wire_groups(ranks: DataParallelRanks, wire: str, wire_weights: str) -> DataParallelRanks:
    """`ranks` with communicators that encode gradients and weights between nodes. Collective."""
    if ranks.everyone.num_nodes == 1 and ranks.everyone.rank == 0 and (line := about_one_node(wire, wire_weights)):
        _warn_once(line)
    gradients, weights = (chosen_format(ranks.everyone, each) for each in (wire, wire_weights))
    if ranks.everyone.num_nodes == 1 or (FORMATS[gradients].is_exact and FORMATS[weights].is_exact):
        return ranks
    names = ("shard", "replicate", "within", "across")
    groups: dict[str, Communicator] = {name: getattr(ranks, name) for name in names}
    fit = dict(zip(names, _lie_alike(ranks, list(groups.values())), strict=True))
    made = {name: _encoding(group, gradients) if fit[name] else group for name, group in groups.items()}
    if not all(fit.values()) and ranks.everyone.rank == 0:
        _log.warning(
            "fully_shard: some gradients are sent as fp32, not as %s, because the data-parallel groups of tensor-parallel ranks lie "
            "differently on the nodes", gradients,
        )  # fmt: skip
    of_weights = _for_weights(ranks, weights, can_encode=fit["shard"])
    wired = WiredGroups(**made, weights=of_weights, encodes_weights=of_weights is not ranks.shard, is_lossy=True)
    return ranks._replace(wired=wired)


def about_one_node(wire: str, wire_weights: str) -> str:
    """A line about formats that have no effect, because all ranks are on one node; "" without one. "auto" chooses fp32 there."""
    asked = [
        f"{name} {each}" for name, each in (("wire", wire), ("wire_weights", wire_weights)) if each not in (EXACT, AUTO)
    ]
    return f"{', '.join(asked)}: these ranks are on one node, so nothing is encoded" if asked else ""


@cache
def _warn_once(line: str) -> None:
    _log.warning("fully_shard: %s", line)


def _lie_alike(ranks: DataParallelRanks, groups: list[Communicator]) -> list[bool]:
    """For each group, whether the same groups of the other tensor-parallel ranks are spread over nodes in the same way. Collective.

    Otherwise the parameters that these ranks hold alike would get different errors [Note: alike].
    """
    if ranks.tensor.size == 1:
        return [True] * len(groups)
    mine = [[list(node) for node in group.nodes] for group in groups]
    of_all = ranks.tensor.all_gather_object(mine)
    return [all(others[i] == mine[i] for others in of_all) for i in range(len(groups))]


def _for_weights(ranks: DataParallelRanks, wire: str, *, can_encode: bool) -> Communicator:
    """The shard group with a wire for weights, if all copies of the model can encode them: all are to compute with the same values."""
    if FORMATS[wire].is_exact or ranks.shard.size == 1:
        return ranks.shard
    encoding = _encoding(ranks.shard, wire)
    can_encode = can_encode and encoding is not ranks.shard and "encoded" in encoding.algorithms("all_gather")
    of_all = ranks.everyone.all_gather_object(can_encode)
    if all(of_all):
        return encoding
    if any(of_all) and ranks.everyone.rank == 0:
        _log.warning(
            "fully_shard: weights are sent as fp32, not as %s, because only %d of %d ranks have their copy of the model on several "
            "nodes with equal numbers of ranks", wire, sum(of_all), len(of_all),
        )  # fmt: skip
    return ranks.shard


def group_for_weights(ranks: DataParallelRanks, size: int) -> Communicator:
    """The group of `size` neighbouring ranks of the shard group, with the wire of weights. Collective.

    It gathers values that were decoded. If the group is on several nodes, they are encoded once more, the same on all ranks.
    """
    group = group_of(ranks.shard, size)
    if ranks.wired.weights is ranks.shard or not all(_lie_alike(ranks, [group])):
        return group
    return _encoding(group, ranks.wired.weights.wire["network"])
