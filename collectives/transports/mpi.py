"""MPI: the executor of schedules over point-to-point, and the MPI library's own collectives. On flat host arrays.

`mpi` is an mpi4py communicator throughout. With `async_op` the library's functions return a request to wait for, else None.
The caller keeps the arrays alive until then: mpi4py's requests hold only some of them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import selection
from collectives.dtypes import DType
from collectives.reduction import divide, reduce_into
from collectives.schedules import Step


class Started(NamedTuple):
    """A reduction under way: the request, what to do once it has ended, and a temporary array to keep alive until then."""

    request: Any
    finish: Callable[[], None] | None
    keep: np.ndarray


# Data travels as opaque elements of its size: MPI has no bf16, and counts stay small.
_MOVES = {1: MPI.BYTE, 2: MPI.UINT16_T, 4: MPI.UINT32_T, 8: MPI.UINT64_T}
_OPS = {"sum": MPI.SUM, "avg": MPI.SUM, "prod": MPI.PROD, "max": MPI.MAX, "min": MPI.MIN}
_ROW = 1 << 20  # elements of a row of a message too large to count
_TAG = 1  # of our own schedules; every communicator is a private clone, so no user's message can be mistaken for one


def library_version() -> str:
    """The MPI library's name and version, in one line."""
    return " ".join(MPI.Get_library_version().strip("\0").splitlines()[0].split(",")[0].split())


def message(flat: np.ndarray, counts: list[int] | int | None = None) -> list[Any]:
    """mpi4py's description of a message that moves `flat`. `counts`: of each rank's part, where it is made of such."""
    kind = _MOVES[flat.itemsize]
    if counts is None:
        counts = flat.size
    if isinstance(counts, int) and counts > selection.MAX_COUNT:
        counts, kind = 1, _block(counts, flat.itemsize)
    return [flat.view(np.uint8), counts, kind]


@functools.cache
def _block(count: int, itemsize: int) -> MPI.Datatype:
    """One MPI datatype for more elements than MPI can count. Kept for the next message of this size."""
    num_rows, rest = divmod(count, _ROW)
    kind = _MOVES[itemsize]
    rows = kind.Create_vector(num_rows, _ROW, _ROW)
    block = MPI.Datatype.Create_struct([1, rest], [0, num_rows * _ROW * itemsize], [rows, kind]).Commit()
    rows.Free()
    return block


def execute(steps: Sequence[Step], mpi: Any, chunks: Sequence[np.ndarray], op: str, dtype: DType) -> None:
    """Carry out `steps`, this rank's program of a schedule, on `chunks`, in place.

    `chunks`: 1-D parts of one buffer, of the same lengths on all ranks. Between hops the element type travels; each hop adds in
    `dtype.accumulate` and rounds, as NCCL does.
    """
    longest = max((chunks[step.recv.chunk].size for step in steps if step.recv and step.recv.reduce), default=0)
    incoming = np.empty(longest, dtype.numpy)
    for send, recv in steps:
        if recv is None:
            assert send is not None, "a step without a send or a receive"
            mpi.Send(message(chunks[send.chunk]), send.peer, _TAG)
            continue
        chunk = chunks[recv.chunk]
        target = incoming[: chunk.size] if recv.reduce else chunk
        if send is None:
            mpi.Recv(message(target), recv.peer, _TAG)
        else:
            mpi.Sendrecv(message(chunks[send.chunk]), send.peer, _TAG, message(target), recv.peer, _TAG)
        if recv.reduce:
            reduce_into(chunk, [chunk, target], op, dtype)


def _reducible(flat: np.ndarray, dtype: DType) -> tuple[np.ndarray, Any]:
    """An array that MPI can reduce, and its MPI datatype: `flat` itself, or a wider copy of halves."""
    if dtype.mpi is None:
        return flat.astype(dtype.accumulate), MPI.FLOAT
    return flat.view(np.uint8) if dtype.name == "bool" else flat, getattr(MPI, dtype.mpi)


def _narrow(wide: np.ndarray, flat: np.ndarray, op: str, size: int, dtype: DType) -> Callable[[], None] | None:
    """What ends a reduction: round `wide` once into `flat` where it is another array, and divide for an average. None: nothing."""

    def round_once() -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            flat[...] = wide / np.float32(size) if op == "avg" else wide

    if dtype.is_half:
        return round_once
    return (lambda: divide(flat, size, dtype)) if op == "avg" else None


def all_reduce(mpi: Any, flat: np.ndarray, op: str, dtype: DType, async_op: bool) -> Started:
    wide, kind = _reducible(flat, dtype)
    issue = mpi.Iallreduce if async_op else mpi.Allreduce
    request = issue(MPI.IN_PLACE, [wide, wide.size, kind], _OPS[op])
    return Started(request, _narrow(wide, flat, op, mpi.size, dtype), wide)


def reduce(mpi: Any, flat: np.ndarray, op: str, root: int, dtype: DType, async_op: bool) -> Started:
    wide, kind = _reducible(flat, dtype)
    issue = mpi.Ireduce if async_op else mpi.Reduce
    if mpi.rank != root:
        return Started(issue([wide, wide.size, kind], None, _OPS[op], root), None, wide)
    request = issue(MPI.IN_PLACE, [wide, wide.size, kind], _OPS[op], root)
    return Started(request, _narrow(wide, flat, op, mpi.size, dtype), wide)


def reduce_scatter(
    mpi: Any, out: np.ndarray, flat: np.ndarray, op: str, counts: Sequence[int], dtype: DType, async_op: bool
) -> Started:
    """`out` must not overlap `flat`."""
    wide, kind = _reducible(flat, dtype)
    mine = np.empty(out.size, wide.dtype) if dtype.is_half else out.view(wide.dtype)
    if len(set(counts)) == 1:
        issue = mpi.Ireduce_scatter_block if async_op else mpi.Reduce_scatter_block
        request = issue([wide, out.size, kind], [mine, out.size, kind], _OPS[op])
    else:
        issue = mpi.Ireduce_scatter if async_op else mpi.Reduce_scatter
        request = issue([wide, wide.size, kind], [mine, mine.size, kind], tuple(counts), _OPS[op])
    return Started(request, _narrow(mine, out, op, mpi.size, dtype), wide)


def all_gather(mpi: Any, out: np.ndarray, counts: Sequence[int], async_op: bool) -> Any:
    """This rank's part stands in its place in `out` already."""
    if len(set(counts)) == 1:
        return (mpi.Iallgather if async_op else mpi.Allgather)(MPI.IN_PLACE, message(out, counts[0]))
    # A list: mpi4py would read a tuple of two as (counts, displacements).
    return (mpi.Iallgatherv if async_op else mpi.Allgatherv)(MPI.IN_PLACE, message(out, list(counts)))


def broadcast(mpi: Any, flat: np.ndarray, root: int, async_op: bool) -> Any:
    return (mpi.Ibcast if async_op else mpi.Bcast)(message(flat), root)


def gather(mpi: Any, out: np.ndarray | None, flat: np.ndarray, root: int, async_op: bool) -> Any:
    """`out`: on the root alone, whose part stands in its place there already."""
    issue = mpi.Igather if async_op else mpi.Gather
    if out is None:
        return issue(message(flat), None, root)
    return issue(MPI.IN_PLACE, message(out, flat.size), root)


def scatter(mpi: Any, out: np.ndarray, flat: np.ndarray | None, root: int, async_op: bool) -> Any:
    """`flat`: on the root alone, which has taken its part itself."""
    issue = mpi.Iscatter if async_op else mpi.Scatter
    if flat is None:
        return issue(None, message(out), root)
    return issue(message(flat, out.size), MPI.IN_PLACE, root)


def all_to_all(mpi: Any, out: np.ndarray, flat: np.ndarray, async_op: bool) -> Any:
    """The two must not overlap."""
    count = flat.size // mpi.size
    return (mpi.Ialltoall if async_op else mpi.Alltoall)(message(flat, count), message(out, count))
