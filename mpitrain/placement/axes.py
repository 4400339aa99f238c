"""The mesh of all kinds of parallelism: which ranks share which work."""

import weakref
from collections.abc import Mapping
from math import prod

import collectives
from collectives import Communicator, Mesh

EXPERTS = ("efsdp", "ep")
"""The axes of the second mesh that stand in the place of dp_shard and cp."""


class ModelMesh(Mesh):
    """A mesh of a model, and `experts`, a second mesh of the same ranks, in which `efsdp` x `ep` is in the place of dp_shard x cp.

    `ep`: the ranks that hold the experts of one layer together, neighbours within dp_shard x cp. `efsdp`: the ranks that hold the same
    experts, over which ZeRO shards them. (The names are torchtitan's; Megatron-LM's EDP is dp_replicate x efsdp.) A look-up may name
    axes of either mesh: `mesh["ep"]`, `mesh["dp_replicate", "efsdp"]`, `mesh["dp_shard", "cp"]`. Groups of the same ranks are one
    communicator.
    """

    def __init__(self, comm: Communicator, axes: Mapping[str, int], *, ep: int) -> None:
        self._ep = ep
        super().__init__(comm, axes)
        self.experts = Mesh(comm, _of_experts(self.axes, ep), beside=self)

    def __getitem__(self, names: str | tuple[str, ...]) -> Communicator:
        asked = names if isinstance(names, tuple) else (names,)
        if not any(name in EXPERTS for name in asked):
            return super().__getitem__(names)
        if "dp_shard" in asked or "cp" in asked:
            raise KeyError(
                f"mesh axes {names}: efsdp x ep divide the ranks of dp_shard x cp in another way; expected axes of one mesh: "
                f"{', '.join(self.experts.axes)}; or {', '.join(self.axes)}"
            )
        return self.experts[names]

    def free(self) -> None:
        self.experts.free()
        super().free()

    def __repr__(self) -> str:
        return super().__repr__() if self._ep == 1 else f"{super().__repr__()[:-1]}, ep={self._ep})"


def mesh(
    comm: Communicator | None = None,
    *,
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    pp: int = 1,
    dp_replicate: int = 1,
    dp_shard: int = -1,
) -> ModelMesh:
    """The mesh of a model: pp x dp_replicate x dp_shard x cp x tp = the ranks of `comm` (None: the world). Collective.

    Args:
        comm: the ranks; None: `collectives.world()`.
        tp: the ranks that hold one layer together (tensor and sequence parallelism).
        cp: the ranks that hold one sequence together.
        ep: the ranks that hold the experts of one layer together; a divisor of dp_shard x cp, see `ModelMesh`.
        pp: the stages of a pipeline.
        dp_replicate: the copies of the model (HSDP).
        dp_shard: the ranks over which ZeRO shards a copy; -1: all ranks that are left.

    The gradient is the mean over dp_replicate x dp_shard x cp. So far no function divides a sequence or experts. With cp > 1
    `fully_shard` also shards along cp, and each of these ranks passes its own batch, or its part of a sequence that the program
    divides. ep > 1 makes groups alone.

    ValueError on all ranks, with the products of both meshes, if the sizes do not fit.
    """
    comm = comm or collectives.world()
    # From the slowest axis to the fastest: ranks of one `tp` group are neighbours, so they share a node where nodes allow it.
    sizes = {"pp": pp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp}
    with comm.together():
        sizes = _fitting(sizes, ep, comm.size)
    return ModelMesh(comm, sizes, ep=ep)


def _fitting(sizes: Mapping[str, int], ep: int, num_ranks: int) -> dict[str, int]:
    """The sizes with that of dp_shard. ValueError unless the product of each mesh is the number of ranks."""
    given = {name: size for name, size in sizes.items() if name != "dp_shard" or size != -1}
    if any(not isinstance(size, int) or size < 1 for size in (*given.values(), ep)):
        raise ValueError(
            f"mesh: expected whole numbers of at least 1, and -1 for dp_shard alone; got {_shown({**sizes, 'ep': ep})}"
        )
    dense = {**sizes, "dp_shard": given.get("dp_shard", max(num_ranks // prod(given.values()), 1))}
    experts = _of_experts(dense, ep)
    if not prod(dense.values()) == prod(experts.values()) == num_ranks:
        raise ValueError(
            f"mesh: expected sizes whose product is the number of ranks, {num_ranks}; got {_shown(dense)} = {prod(dense.values())}, "
            f"and for experts {_shown(experts)} = {prod(experts.values())}; dp_shard=-1 takes the ranks that are left, and ep must "
            "divide dp_shard x cp"
        )
    return dense


def _of_experts(dense: Mapping[str, int], ep: int) -> dict[str, int]:
    """The axes of the experts' mesh."""
    pp, dp_replicate, dp_shard, cp, tp = dense.values()
    return {"pp": pp, "dp_replicate": dp_replicate, "efsdp": max(dp_shard * cp // ep, 1), "ep": ep, "tp": tp}


def _shown(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in sizes.items())


# A split is collective and makes a communicator, so all users of a group share it. Weak keys free unused communicators.
_groups: "weakref.WeakKeyDictionary[Communicator, dict[int | frozenset[int], Communicator | None]]" = (
    weakref.WeakKeyDictionary()
)


def group_of(comm: Communicator, size: int) -> Communicator:
    """The group of `size` neighbouring ranks of `comm` that includes this rank. `size` divides `comm.size`. Collective."""
    groups = _groups.setdefault(comm, {})
    if size not in groups:
        groups[size] = comm.split(comm.rank // size)
    group = groups[size]
    assert group is not None
    return group


def group_among(comm: Communicator, ranks: frozenset[int]) -> Communicator | None:
    """The group of some ranks of `comm`; None on the others. Collective over all of `comm`."""
    groups = _groups.setdefault(comm, {})
    if ranks not in groups:
        groups[ranks] = comm.split(0 if comm.rank in ranks else None)
    return groups[ranks]
