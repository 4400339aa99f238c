"""The groups of ranks: the shard group holds one copy of the model, the replicate group holds copies of one shard."""

from typing import NamedTuple

import collectives
from collectives import Communicator, Mesh
from mpitrain.axes import group_of

REPLICATE, SHARD, MODEL = ("dp_replicate",), ("dp_shard", "cp"), ("pp", "tp")
"""The axes of a mesh along which a model has copies, along which ZeRO shards a copy (together: the data-parallel group), and along
which `pipeline` and `tensor_parallel` divide the model."""


class DataParallelRanks(NamedTuple):
    """The groups of ranks that train one model on different data.

    `shard`: the shard group, whose ranks hold the shards of one copy of the model. `replicate`: the replicate group, whose ranks hold
    the same shard of different copies. `data_parallel`: all ranks of all copies. With one copy (ZeRO) the replicate group has only this
    rank. If each rank has a copy (data parallel), the shard group has only this rank.
    """

    data_parallel: Communicator
    shard: Communicator
    replicate: Communicator
    copy: Communicator
    """The ranks that hold one copy of the model: the shard group, and along other axes (tensors, stages) its counterparts."""
    everyone: Communicator
    """All ranks of the mesh."""

    @property
    def has_replicas(self) -> bool:
        """Whether there are several copies of the model."""
        return self.replicate.size > 1


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


def data_parallel_ranks(mesh: Mesh | Communicator | None, *, whole: bool = False) -> DataParallelRanks:
    """The groups of a mesh, or of a communicator (None: the world), over which one copy is sharded. Collective.

    `whole`: each rank holds its own whole copy. ValueError if the mesh has other axes longer than 1.
    """
    if isinstance(mesh, Mesh):
        known = REPLICATE + SHARD + MODEL
        others = [f"{name}={size}" for name, size in mesh.axes.items() if size > 1 and name not in known]
        if others:
            raise ValueError(
                f"fully_shard: nothing divides a model along mesh axes {', '.join(others)}, so their ranks would train models that "
                f"differ; expected sizes above 1 only of {', '.join(known)}"
            )
        data, replicate, shard, alone = (_along(mesh, role) for role in (REPLICATE + SHARD, REPLICATE, SHARD, ()))
        if whole:
            return DataParallelRanks(data, alone, data, _along(mesh, MODEL), mesh.comm)
        return DataParallelRanks(data, shard, replicate, _along(mesh, SHARD + MODEL), mesh.comm)
    data = mesh or collectives.world()
    alone = group_of(data, 1)
    return (
        DataParallelRanks(data, alone, data, alone, data) if whole else DataParallelRanks(data, data, alone, data, data)
    )


def _along(mesh: Mesh, role: tuple[str, ...]) -> Communicator:
    """This rank's group along those axes of `role` that the mesh has."""
    return mesh[tuple(name for name in mesh.axes if name in role)]
