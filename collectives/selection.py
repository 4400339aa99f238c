"""Which algorithm runs: a rule of size and type for now. Pure: the same answer on every rank that passes the same arguments."""

from collectives.dtypes import DType
from collectives.schedules import BUILDERS

# What each operation can be asked for, besides "auto".
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "all_reduce": ("mpi", "shared", *BUILDERS["all_reduce"]),
    "all_gather": ("mpi", "shared", *BUILDERS["all_gather"]),
    "reduce_scatter": ("mpi", "shared", *BUILDERS["reduce_scatter"]),
    "broadcast": ("mpi", *BUILDERS["broadcast"]),
    "reduce": ("mpi", *BUILDERS["reduce"]),
    "gather": ("mpi",),
    "scatter": ("mpi",),
    "all_to_all": ("mpi",),
}

# Below this a tree's few rounds win over a ring's few bytes (measured on 2 and 4 ranks of one machine).
SHORT_BYTES = 32 << 10

# MPI 3 counts in int. Larger messages are described by datatypes of more elements, which MPI's reductions do not take.
MAX_COUNT = (1 << 31) - 1
_COUNTED = ("all_reduce", "all_gather", "reduce_scatter", "reduce")


def choose(operation: str, algorithm: str, *, dtype: DType, nbytes: int, in_node_memory: bool) -> str:
    """The algorithm to run. `in_node_memory`: the buffers lie in this communicator's `empty` or `node.shared` arrays.

    ValueError if `algorithm` is unknown or cannot work on these buffers.
    """
    known = ALGORITHMS[operation]
    too_large = nbytes > MAX_COUNT * dtype.itemsize and operation in _COUNTED
    if algorithm == "auto":
        if in_node_memory and "shared" in known:
            return "shared"
        # The MPI library cannot add halves; its detour over fp32 moves twice the bytes.
        if too_large or (dtype.is_half and operation in ("all_reduce", "reduce_scatter", "reduce")):
            short = "tree" if "tree" in known else "ring"
            long = "ring" if "ring" in known else "tree"
            return short if nbytes <= SHORT_BYTES else long
        return "mpi"
    if algorithm not in known:
        raise ValueError(f"{operation}: algorithm {algorithm!r} is unknown; expected auto, {', '.join(known)}")
    if algorithm == "mpi" and too_large:
        raise ValueError(
            f"{operation}: algorithm 'mpi' takes up to {MAX_COUNT} elements, not {nbytes // dtype.itemsize}; "
            f"use auto or {known[-1]}"
        )
    if algorithm == "shared" and nbytes == 0:
        return "mpi"  # nothing to move, and nothing to tell where it lies
    if algorithm == "shared" and not in_node_memory:
        raise ValueError(
            f"{operation}: algorithm 'shared' works on arrays made by this communicator's empty() or node.shared(), "
            "where all its ranks are on one node; use another algorithm"
        )
    return algorithm
