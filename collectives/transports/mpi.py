"""MPI: the executor of schedules over point-to-point, and the MPI library's own collectives. On flat host arrays.

`mpi` is an mpi4py communicator throughout. The library functions return (request, finish): with `async_op` a request to wait for,
and what remains to be done once the operation has ended.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.dtypes import DType
from collectives.reduction import divide, reduce_into
from collectives.schedules import Schedule

Started = tuple[Any, Callable[[], None] | None]

# Data travels as opaque elements of its size: MPI has no bf16, and counts stay small.
_MOVES = {1: MPI.BYTE, 2: MPI.UINT16_T, 4: MPI.UINT32_T, 8: MPI.UINT64_T}
_OPS = {"sum": MPI.SUM, "avg": MPI.SUM, "prod": MPI.PROD, "max": MPI.MAX, "min": MPI.MIN}
_TAG = 1  # of our own schedules; every communicator is a private clone, so no user's message can be mistaken for one


def message(flat: np.ndarray, counts: Sequence[int] | None = None) -> list[Any]:
    """mpi4py's description of a message that moves `flat`."""
    kind = _MOVES[flat.itemsize]
    raw = flat.view(np.uint8) if flat.size else np.empty(0, np.uint8)
    return [raw, flat.size, kind] if counts is None else [raw, tuple(counts), kind]


def execute(schedule: Schedule, mpi: Any, chunks: Sequence[np.ndarray], op: str, dtype: DType) -> None:
    """Carry out this rank's steps of `schedule` on `chunks` (1-D parts of one buffer, the same lengths on all ranks), in place.

    Between hops the element type travels; each hop adds in `dtype.accumulate` and rounds, as NCCL does.
    """
    steps = schedule.program(mpi.rank)
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


def _narrow(wide: np.ndarray, flat: np.ndarray, op: str, size: int, dtype: DType) -> None:
    """The end of a reduction: divide for an average and round once into `flat`, which `wide` may already be."""
    if dtype.is_half:
        with np.errstate(over="ignore", invalid="ignore"):
            flat[...] = wide / np.float32(size) if op == "avg" else wide
    elif op == "avg":
        divide(flat, size, dtype)


def all_reduce(mpi: Any, flat: np.ndarray, op: str, dtype: DType, async_op: bool) -> Started:
    wide, kind = _reducible(flat, dtype)
    issue = mpi.Iallreduce if async_op else mpi.Allreduce
    return issue(MPI.IN_PLACE, [wide, wide.size, kind], _OPS[op]), lambda: _narrow(wide, flat, op, mpi.size, dtype)


def reduce(mpi: Any, flat: np.ndarray, op: str, root: int, dtype: DType, async_op: bool) -> Started:
    wide, kind = _reducible(flat, dtype)
    issue = mpi.Ireduce if async_op else mpi.Reduce
    if mpi.rank != root:
        return issue([wide, wide.size, kind], None, _OPS[op], root), None
    return issue(MPI.IN_PLACE, [wide, wide.size, kind], _OPS[op], root), lambda: _narrow(
        wide, flat, op, mpi.size, dtype
    )


def reduce_scatter(
    mpi: Any, out: np.ndarray, flat: np.ndarray, op: str, counts: Sequence[int], dtype: DType, async_op: bool
) -> Started:
    wide, kind = _reducible(flat, dtype)
    mine = np.empty(out.size, wide.dtype) if dtype.is_half else out.view(wide.dtype)
    if len(set(counts)) == 1:
        issue = mpi.Ireduce_scatter_block if async_op else mpi.Reduce_scatter_block
        request = issue([wide, wide.size, kind], [mine, mine.size, kind], _OPS[op])
    else:
        issue = mpi.Ireduce_scatter if async_op else mpi.Reduce_scatter
        request = issue([wide, wide.size, kind], [mine, mine.size, kind], tuple(counts), _OPS[op])
    return request, lambda: _narrow(mine, out, op, mpi.size, dtype)


def all_gather(mpi: Any, out: np.ndarray, flat: np.ndarray, counts: Sequence[int], async_op: bool) -> Started:
    if len(set(counts)) == 1:
        issue = mpi.Iallgather if async_op else mpi.Allgather
        kind = _MOVES[flat.itemsize]
        return issue(message(flat), [out.view(np.uint8), counts[0], kind]), None
    issue = mpi.Iallgatherv if async_op else mpi.Allgatherv
    return issue(message(flat), message(out, counts)), None


def broadcast(mpi: Any, flat: np.ndarray, root: int, async_op: bool) -> Started:
    return (mpi.Ibcast if async_op else mpi.Bcast)(message(flat), root), None


def gather(mpi: Any, out: np.ndarray | None, flat: np.ndarray, root: int, async_op: bool) -> Started:
    part = [None if out is None else out.view(np.uint8), flat.size, _MOVES[flat.itemsize]]
    return (mpi.Igather if async_op else mpi.Gather)(message(flat), None if out is None else part, root), None


def scatter(mpi: Any, out: np.ndarray, flat: np.ndarray | None, root: int, async_op: bool) -> Started:
    part = None if flat is None else [flat.view(np.uint8), out.size, _MOVES[out.itemsize]]
    return (mpi.Iscatter if async_op else mpi.Scatter)(part, message(out), root), None


def all_to_all(mpi: Any, out: np.ndarray, flat: np.ndarray, async_op: bool) -> Started:
    count, kind = flat.size // mpi.size, _MOVES[flat.itemsize]
    issue = mpi.Ialltoall if async_op else mpi.Alltoall
    return issue([flat.view(np.uint8), count, kind], [out.view(np.uint8), count, kind]), None
