"""Which algorithm runs: a rule of size and type for now. Pure: the same answer on every rank that passes the same arguments."""

from collections.abc import Mapping

from collectives.dtypes import DType
from collectives.schedules import BUILDERS

# What each operation can be asked for, besides "auto".
ALGORITHMS: dict[str, tuple[str, ...]] = {
    operation: (
        "mpi",
        "shared",
        *(("two_level",) if operation in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce") else ()),
        *(name for name in BUILDERS.get(operation, ()) if name != "two_level"),
        "nccl",
    )
    for operation in (
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "broadcast",
        "reduce",
        "gather",
        "scatter",
        "all_to_all",
    )
}

# Below this a tree's few rounds win over a ring's few bytes (measured on 2 and 4 ranks of one machine).
SHORT_BYTES = 32 << 10

# MPI 3 counts in int. Larger messages are described by datatypes of more elements, which MPI's reductions do not take.
MAX_COUNT = (1 << 31) - 1
_COUNTED = ("all_reduce", "all_gather", "reduce_scatter", "reduce")


def choose(
    operation: str, algorithm: str, infeasible: Mapping[str, str], *, dtype: DType, nbytes: int, in_node_memory: bool
) -> str:
    """The algorithm to run. `infeasible`: algorithms that these ranks cannot run, and why. `in_node_memory`: see `empty`, `shared`.

    ValueError if `algorithm` is unknown or cannot work on these buffers.
    """
    known = ALGORITHMS[operation]
    too_large = nbytes > MAX_COUNT * dtype.itemsize and operation in _COUNTED
    if algorithm == "auto":
        if "shared" not in infeasible and nbytes and (in_node_memory or nbytes >= 1 << 19):
            return "shared"
        if "two_level" in known and "two_level" not in infeasible and nbytes >= 1 << 19:
            return "two_level"
        # The MPI library cannot add halves; its detour over fp32 moves twice the bytes.
        if too_large or (dtype.is_half and operation in ("all_reduce", "reduce_scatter", "reduce")):
            short = "tree" if "tree" in known else "ring"
            long = "ring" if "ring" in known else "tree"
            return short if nbytes <= SHORT_BYTES else long
        return "mpi"
    if algorithm not in known:
        raise ValueError(f"{operation}: algorithm {algorithm!r} is unknown; expected auto, {', '.join(known)}")
    if algorithm in infeasible:
        raise ValueError(f"{operation}: algorithm {algorithm!r} cannot be used here: {infeasible[algorithm]}")
    if algorithm == "mpi" and too_large:
        raise ValueError(
            f"{operation}: algorithm 'mpi' takes up to {MAX_COUNT} elements, not {nbytes // dtype.itemsize}; "
            f"use auto or {known[-1]}"
        )
    return algorithm
