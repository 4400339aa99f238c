"""The groups of ranks: the shard group holds one copy of the model, the replicate group holds copies of one shard."""

from typing import NamedTuple

import collectives
from collectives import Communicator, Mesh
from mpitrain.placement.axes import group_of

REPLICATE, SHARD, STAGES, TENSOR = ("dp_replicate",), ("dp_shard", "cp"), ("pp",), ("tp",)
"""The axes of a mesh along which a model has copies, along which ZeRO shards a copy (together: the data-parallel group), and along
which `pipeline` and `tensor_parallel` divide the model."""


class WiredGroups(NamedTuple):
    """The communicators of data that may be encoded between nodes: see wires.py. Everything else is exact."""

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
