"""The mesh of all kinds of parallelism: which ranks share which work."""

from collections.abc import Mapping
from math import prod

import collectives
from collectives import Communicator, Mesh


def mesh(
    comm: Communicator | None = None,
    *,
    tp: int = 1,
    cp: int = 1,
    pp: int = 1,
    dp_replicate: int = 1,
    dp_shard: int = -1,
) -> Mesh:
    """The mesh of a model: pp x dp_replicate x dp_shard x cp x tp = the ranks of `comm` (None: the world). Collective.

    Args: tp: the ranks that hold one layer together (tensor and sequence parallelism). cp: the ranks that hold one sequence together.
    pp: the stages of a pipeline. dp_replicate: the copies of the model (HSDP). dp_shard: the ranks over which ZeRO shards a copy; -1:
    all ranks that are left.

    The gradient is the mean over dp_replicate x dp_shard x cp. ValueError on all ranks, with both products, if the sizes do not fit.
    """
    comm = comm or collectives.world()
    # From the slowest axis to the fastest: ranks of one `tp` group are neighbours, so they share a node where nodes allow it.
    sizes = {"pp": pp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp}
    with comm.together():
        _check(sizes, comm.size)
    return Mesh(comm, sizes)


def _check(sizes: Mapping[str, int], num_ranks: int) -> None:
    given = {name: size for name, size in sizes.items() if size != -1}
    product = prod(given.values())
    if any(size < 1 for size in given.values()) or not set(sizes) - set(given) <= {"dp_shard"}:
        raise ValueError(f"mesh: expected sizes of at least 1, and -1 for dp_shard alone; got {_shown(sizes)}")
    if len(given) < len(sizes) and num_ranks % product == 0:
        return
    if product != num_ranks:
        rest = "the number of ranks, with dp_shard as the rest" if len(given) < len(sizes) else "the number of ranks"
        raise ValueError(
            f"mesh: {_shown(given)} = {product} must {'divide' if rest != 'the number of ranks' else 'be'} {rest}: {num_ranks}"
        )


def _shown(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in sizes.items())
