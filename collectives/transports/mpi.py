"""The MPI library's own collectives on flat arrays, and mpi4py's descriptions of messages.

`mpi` is always an mpi4py communicator. MPI cannot add fp16 and bf16, so they are converted to fp32, which needs host memory.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.arrays import reduction
from collectives.arrays.buffer import address_of
from collectives.arrays.dtypes import DType
from collectives.arrays.reduction import UFUNCS, Arithmetic, copy, mpi_agrees
from collectives.diagnosis.job import all_ranks
from collectives.selection import selector
from collectives.transports.transport import Counts, put_own_part

# MPI datatypes by item size for elements that are only moved: MPI has no bf16. Counts stay smaller than with bytes.
_MOVES = {
    1: MPI.BYTE,
    2: MPI.UINT16_T,
    4: MPI.UINT32_T,
    8: MPI.UINT64_T,
    16: MPI.UINT64_T.Create_contiguous(2).Commit(),
}
_OPS = {"sum": MPI.SUM, "avg": MPI.SUM, "prod": MPI.PROD, "max": MPI.MAX, "min": MPI.MIN}
_ROW = 1 << 20  # elements in a row of a message with more than MAX_COUNT elements


def library_version() -> str:
    """The MPI library's name and version, in one line."""
    return " ".join(MPI.Get_library_version().strip("\0").splitlines()[0].split(",")[0].split())


def ranks_of_job(mpi: Any) -> list[int]:
    """The ranks of `mpi` as the job numbers them."""
    group, world = mpi.Get_group(), all_ranks().Get_group()
    ranks: list[int] = group.Translate_ranks(None, world)
    group.Free()
    world.Free()
    return ranks


def message(flat: np.ndarray, counts: list[int] | int | None = None) -> list[Any]:
    """mpi4py's description of a message that moves `flat`. `counts`: the elements of each rank's part, if `flat` has such parts."""
    kind = _MOVES[flat.itemsize]
    if counts is None:
        counts = flat.size
    if isinstance(counts, int) and counts > selector.MAX_COUNT:
        counts, kind = 1, _block(counts, flat.itemsize)
    return [flat.view(np.uint8), counts, kind]


@functools.cache
def _block(count: int, itemsize: int) -> MPI.Datatype:
    """One MPI datatype of more elements than an MPI count can express, cached for the next message of this size."""
    num_rows, rest = divmod(count, _ROW)
    kind = _MOVES[itemsize]
    rows = kind.Create_vector(num_rows, _ROW, _ROW)
    block = MPI.Datatype.Create_struct([1, rest], [0, num_rows * _ROW * itemsize], [rows, kind]).Commit()
    rows.Free()
    return block


@functools.cache
def _op(op: str, dtype: np.dtype) -> MPI.Op:
    """MPI's operation, or a function of NumPy if MPI libraries give other results. That function cannot read device memory."""
    if mpi_agrees(op, dtype):
        return _OPS[op]
    ufunc = UFUNCS[op]

    def combine(mine: Any, total: Any, datatype: MPI.Datatype) -> None:
        result = np.frombuffer(total, dtype)
        ufunc(np.frombuffer(mine, dtype), result, out=result)

    # For 0.0 and -0.0 NumPy's max and min return the second operand. As commutative operations they could give ranks different bits.
    return MPI.Op.Create(combine, commute=op not in ("max", "min"))


def _reducible(flat: np.ndarray, dtype: DType) -> tuple[np.ndarray, Any]:
    """An array that MPI can reduce, and its MPI datatype: `flat` itself, or an fp32 copy of fp16 or bf16."""
    if dtype.mpi is None:
        wide = np.empty(flat.size, dtype.accumulate)
        copy(wide, flat)
        return wide, MPI.FLOAT
    return flat.view(np.uint8) if dtype.name == "bool" else flat, getattr(MPI, dtype.mpi)


class Library:
    """The collectives of the MPI library on the ranks of `mpi`. `arithmetic`: for the kind of memory of the arrays.

    `is_shared(flat)`: whether other ranks of the node have an array in the same memory.
    """

    def __init__(
        self,
        mpi: Any,
        arithmetic: Arithmetic = reduction,
        is_shared: Callable[[np.ndarray], bool] = lambda flat: False,
    ) -> None:
        self._mpi, self._memory, self._is_shared = mpi, arithmetic, is_shared

    def all_reduce(self, flat: np.ndarray, op: str, dtype: DType) -> None:
        wide, kind = _reducible(flat, dtype)
        self._mpi.Allreduce(MPI.IN_PLACE, [wide, wide.size, kind], _op(op, wide.dtype))
        self._finish(wide, flat, op, dtype)

    def reduce(self, flat: np.ndarray, op: str, root: int, dtype: DType) -> None:
        wide, kind = _reducible(flat, dtype)
        if self._mpi.rank != root:
            self._mpi.Reduce([wide, wide.size, kind], None, _op(op, wide.dtype), root)
        else:
            self._mpi.Reduce(MPI.IN_PLACE, [wide, wide.size, kind], _op(op, wide.dtype), root)
            self._finish(wide, flat, op, dtype)

    def reduce_scatter(self, out: np.ndarray, flat: np.ndarray, op: str, counts: Sequence[int], dtype: DType) -> None:
        if np.may_share_memory(out, flat):  # MPI forbids overlapping arrays
            given, flat = flat, self._memory.empty(flat.size, flat.dtype)
            self._memory.move(flat, given)
        wide, kind = _reducible(flat, dtype)
        mine = np.empty(out.size, wide.dtype) if dtype.is_half else out.view(wide.dtype)
        if counts.count(counts[0]) == len(counts):
            self._mpi.Reduce_scatter_block([wide, out.size, kind], [mine, out.size, kind], _op(op, wide.dtype))
        else:
            self._mpi.Reduce_scatter(
                [wide, wide.size, kind], [mine, mine.size, kind], tuple(counts), _op(op, wide.dtype)
            )
        self._finish(mine, out, op, dtype)

    def all_gather(self, out: np.ndarray, flat: np.ndarray, counts: Sequence[int]) -> None:
        if self._is_shared(out):
            # MPI libraries may keep parts in other places of `out` meanwhile, where other ranks read them (Open MPI's Bruck does).
            private = np.empty_like(out)
            self.all_gather(private, flat, counts)
            out[...] = private
            return
        put_own_part(out, flat, counts, self._mpi.rank, self._memory)
        if counts.count(counts[0]) == len(counts):
            self._mpi.Allgather(MPI.IN_PLACE, message(out, counts[0]))
        else:  # a list, because mpi4py reads a tuple of two as (counts, displacements)
            self._mpi.Allgatherv(MPI.IN_PLACE, message(out, list(counts)))

    def broadcast(self, flat: np.ndarray, root: int) -> None:
        self._mpi.Bcast(message(flat), root)

    def gather(self, out: np.ndarray | None, flat: np.ndarray, root: int) -> None:
        if out is None:
            self._mpi.Gather(message(flat), None, root)
        else:
            self._mpi.Gather(MPI.IN_PLACE, message(out, flat.size), root)

    def scatter(self, out: np.ndarray, flat: np.ndarray | None, root: int) -> None:
        if flat is None:
            self._mpi.Scatter(None, message(out), root)
        else:
            self._mpi.Scatter(message(flat, out.size), MPI.IN_PLACE, root)

    def all_to_all(self, out: np.ndarray, flat: np.ndarray, counts: Counts | None = None) -> None:
        if counts is not None:
            self._mpi.Alltoallv(message(flat, list(counts.send)), message(out, list(counts.recv)))
            return
        count = flat.size // self._mpi.size
        self._mpi.Alltoall(message(flat, count), message(out, count))

    def _finish(self, wide: np.ndarray, flat: np.ndarray, op: str, dtype: DType) -> None:
        """Finish a reduction with its result in `wide`: divide for an average, and round once to `flat` for fp16 and bf16."""
        if dtype.is_half:
            if op == "avg":
                wide /= np.float32(self._mpi.size)
            copy(flat, wide)
        elif op == "avg":
            self._memory.divide(flat, self._mpi.size, dtype)

    def plan(self, operation: str, *arguments: Any) -> tuple[Callable[..., None], tuple[Any, ...]] | None:
        """The single call of MPI that carries out an operation with these arguments; the plan does not keep the arrays alive.

        `all_gather` and `reduce_scatter` need equal counts and may not be in place. None if one call is not enough.
        """
        match operation, arguments:
            case "all_reduce", (flat, op, dtype) if dtype.mpi is not None and op != "avg":
                return self._mpi.Allreduce, (MPI.IN_PLACE, _place(flat, getattr(MPI, dtype.mpi)), _op(op, dtype.numpy))
            case "reduce_scatter", (out, flat, op, _, dtype) if dtype.mpi is not None and op != "avg":
                kind = getattr(MPI, dtype.mpi)
                return self._mpi.Reduce_scatter_block, (
                    _place(flat, kind, out.size),
                    _place(out, kind),
                    _op(op, dtype.numpy),
                )
            case "all_gather", (out, flat, _) if flat.size <= selector.MAX_COUNT and not self._is_shared(out):
                kind = _MOVES[out.itemsize]
                return self._mpi.Allgather, (_place(flat, kind), _place(out, kind, flat.size))
            case "broadcast", (flat, root) if flat.size <= selector.MAX_COUNT:
                return self._mpi.Bcast, (_place(flat, _MOVES[flat.itemsize]), root)
        return None


def _place(flat: np.ndarray, kind: MPI.Datatype, count: int | None = None) -> list[Any]:
    """mpi4py's description of a message by address, which does not keep `flat` alive."""
    return [MPI.memory.fromaddress(address_of(flat), flat.nbytes), flat.size if count is None else count, kind]
