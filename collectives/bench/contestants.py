"""Who takes part: calls of an operation by each algorithm, by plain mpi4py and by Gloo, all on the same memory.

The contestants on private memory share one set of arrays, whichever library sees them: what pages lie under an array (huge ones or
not) and whether they were touched is then the same for all. The arrays hold zeros, which stay zeros however often they are added.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays.buffer import as_numpy
from collectives.arrays.dtypes import DType
from collectives.bench.arrays import Arrays
from collectives.bench.gloo import Gloo
from collectives.bench.results import RAW
from collectives.communicator.communicator import Communicator
from collectives.diagnosis import on_all_ranks
from collectives.selection.selector import NODE_OPERATIONS

OPERATIONS = (
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "all_to_all",
)  # fmt: skip
ARRAYS = ("numpy", "torch")
IN_PLACE = "in place"  # of all_gather: each part stands in its place in the node's array already
Key = tuple[str, str]  # algorithm (or a peer's name) and memory
Call = Callable[[], Any]


# Which of them an operation reads.
_READS = {"all_gather": "part", "gather": "part"}


class Contestant(NamedTuple):
    call: Call
    read: np.ndarray  # what the call reads: written anew before each


class Contestants(NamedTuple):
    calls: dict[Key, Contestant]
    skipped: dict[Key, str]  # and why


def contestants(
    comm: Communicator,
    operation: str,
    count: int,
    dtype: DType,
    *,
    memories: Sequence[str] = ("private", "node"),
    arrays: str = "numpy",
    peers: Sequence[str] = (RAW,),
    gloo: Gloo | None = None,
    fixed_only: bool = False,
    without: Collection[str] = (),
) -> Contestants:
    """Calls on arrays of `count` elements in all, a multiple of the ranks. Collective: the calls are the same on all ranks.

    Ours: "auto", and each algorithm that can work in each of `memories`; in the node's memory those alone that are made for it.
    `fixed_only`: no "auto", but in the node's memory too all that can work there. `without`: these algorithms. `gloo`: needed for the
    peer GLOO.
    """
    calls: dict[Key, Contestant] = {}
    skipped: dict[Key, str] = {}
    reads = _READS.get(operation, "whole")
    private = _filled(Arrays(*(_empty(n, dtype, arrays) for n in _lengths(comm, operation, count))))
    for peer in peers:
        made = _raw(comm, operation, private, dtype) if peer == RAW else gloo and gloo.call(comm, operation, private)
        if callable(made):
            calls[peer, "private"] = Contestant(made, as_numpy(getattr(private, reads)))
        else:
            skipped[peer, "private"] = made or "not started"
    nbytes = count * dtype.itemsize
    for memory in memories:
        names = [name for name in comm.algorithms(operation, dtype, nbytes) if name not in without]
        used = private
        if memory == "node":
            if "shared" not in names or operation not in NODE_OPERATIONS:
                continue
            names = names if fixed_only else ["shared"]
            try:
                used = _in_node_memory(comm, operation, private, dtype)
            except OSError as error:
                if not on_all_ranks(error):
                    raise
                skipped["auto", memory] = str(error)
                continue
        for name in names if fixed_only else ["auto", *names]:
            call = _ours(comm, operation, name, used)
            calls[name, memory] = Contestant(call, as_numpy(getattr(used, reads)))
        if memory == "node" and operation == "all_gather" and not fixed_only:
            mine = used.whole.reshape(comm.size, -1)[comm.rank]
            call = _ours(comm, operation, "auto", used._replace(part=mine))
            calls["auto", IN_PLACE] = Contestant(call, as_numpy(mine))
    return Contestants(calls, skipped)


def _lengths(comm: Communicator, operation: str, count: int) -> tuple[int, int, int]:
    return count, count // comm.size, count if operation == "all_to_all" else 0


def _empty(count: int, dtype: DType, arrays: str) -> Any:
    if arrays == "numpy":
        return np.empty(count, dtype.numpy)
    import torch

    return torch.empty(count, dtype=getattr(torch, dtype.name))


def _filled(arrays: Arrays) -> Arrays:
    for array in arrays:
        as_numpy(array)[...] = 0  # written, so that the pages exist
    return arrays


def _in_node_memory(comm: Communicator, operation: str, private: Arrays, dtype: DType) -> Arrays:
    """The same with the whole arrays in the node's memory: one for all in an all-gather, else one a rank. OSError if it is full."""
    kind = dtype.numpy if isinstance(private.whole, np.ndarray) else private.whole.dtype
    make = comm.shared if operation == "all_gather" else comm.empty
    whole = make(len(private.whole), kind)
    other = comm.empty(len(private.other), kind) if len(private.other) else private.other
    return _filled(Arrays(whole, private.part, other))


def _ours(comm: Communicator, operation: str, algorithm: str, arrays: Arrays) -> Call:
    whole, part, other = arrays
    at_root = whole if comm.rank == 0 else None
    return {
        "all_reduce": lambda: comm.all_reduce(whole, algorithm=algorithm),
        "all_gather": lambda: comm.all_gather(whole, part, algorithm=algorithm),
        "reduce_scatter": lambda: comm.reduce_scatter(part, whole, algorithm=algorithm),
        "broadcast": lambda: comm.broadcast(whole, algorithm=algorithm),
        "reduce": lambda: comm.reduce(whole, algorithm=algorithm),
        "gather": lambda: comm.gather(at_root, part, algorithm=algorithm),
        "scatter": lambda: comm.scatter(part, at_root, algorithm=algorithm),
        "all_to_all": lambda: comm.all_to_all(other, whole, algorithm=algorithm),
    }[operation]


def _raw(comm: Communicator, operation: str, arrays: Arrays, dtype: DType) -> Call | str:
    """The same in plain mpi4py, as its user would write it; a reason where MPI has no such type to reduce."""
    from mpi4py import MPI

    mpi, is_root = comm.mpi, comm.rank == 0
    if dtype.mpi is None and operation in ("all_reduce", "reduce_scatter", "reduce"):
        return f"MPI has no {dtype.name} to reduce"
    # Halves are only moved here: as bytes.
    kind, units = (MPI.BYTE, dtype.itemsize) if dtype.mpi is None else (getattr(MPI, dtype.mpi), 1)
    whole, part, other = (as_numpy(array).view(np.uint8) for array in arrays)
    num_whole, num_part = len(arrays.whole) * units, len(arrays.part) * units
    if num_whole > 2**31 - 1:
        return "more elements than MPI counts"
    all_of, part_of = [whole, num_whole, kind], [part, num_part, kind]
    parts = [whole, num_part, kind]  # as MPI counts them: those of one rank
    return {
        "all_reduce": lambda: mpi.Allreduce(MPI.IN_PLACE, [whole, num_whole, kind], MPI.SUM),
        "all_gather": lambda: mpi.Allgather([part, num_part, kind], [whole, num_part, kind]),
        "reduce_scatter": lambda: mpi.Reduce_scatter_block([whole, num_part, kind], [part, num_part, kind], MPI.SUM),
        "broadcast": lambda: mpi.Bcast([whole, num_whole, kind], 0),
        "reduce": lambda: mpi.Reduce(MPI.IN_PLACE if is_root else all_of, all_of if is_root else None, MPI.SUM, 0),
        "gather": lambda: mpi.Gather(part_of, parts if is_root else None, 0),
        "scatter": lambda: mpi.Scatter(parts if is_root else None, part_of, 0),
        "all_to_all": lambda: mpi.Alltoall(parts, [other, num_part, kind]),
    }[operation]
