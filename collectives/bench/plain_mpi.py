"""The peer MPI: the library's own collectives in plain mpi4py, as a user would write them."""

from contextlib import ExitStack
from typing import ClassVar

import numpy as np

from collectives.arrays.buffer import as_numpy
from collectives.arrays.dtypes import dtype_of
from collectives.bench.kit.turns import CannotTakePart
from collectives.bench.peer import Arrays, Call
from collectives.bench.results import RAW
from collectives.communicator.communicator import Communicator


class PlainMpi:
    """Calls of mpi4py on the communicator that `comm` uses."""

    name: ClassVar[str] = RAW

    def __init__(self, comm: Communicator, ended: ExitStack) -> None:
        self._mpi, self._is_root = comm.mpi, comm.rank == 0

    def call(self, operation: str, arrays: Arrays) -> Call:
        from mpi4py import MPI

        mpi, is_root, dtype = self._mpi, self._is_root, dtype_of(arrays.whole.dtype)
        if dtype.mpi is None and operation in ("all_reduce", "reduce_scatter", "reduce"):
            raise CannotTakePart(f"MPI has no {dtype.name} to reduce")
        # A dtype without an MPI datatype is only moved here, as bytes.
        kind, units = (MPI.BYTE, dtype.itemsize) if dtype.mpi is None else (getattr(MPI, dtype.mpi), 1)
        num_whole, num_part = len(arrays.whole) * units, len(arrays.part) * units
        if num_whole > 2**31 - 1:
            raise CannotTakePart("more elements than MPI counts")
        whole, part, other = (as_numpy(array).view(np.uint8) for array in arrays)
        all_of, part_of = [whole, num_whole, kind], [part, num_part, kind]
        parts = [whole, num_part, kind]  # MPI counts the elements of one rank
        return {
            "all_reduce": lambda: mpi.Allreduce(MPI.IN_PLACE, all_of, MPI.SUM),
            "all_gather": lambda: mpi.Allgather(part_of, parts),
            "reduce_scatter": lambda: mpi.Reduce_scatter_block(parts, part_of, MPI.SUM),
            "broadcast": lambda: mpi.Bcast(all_of, 0),
            "reduce": lambda: mpi.Reduce(MPI.IN_PLACE if is_root else all_of, all_of if is_root else None, MPI.SUM, 0),
            "gather": lambda: mpi.Gather(part_of, parts if is_root else None, 0),
            "scatter": lambda: mpi.Scatter(parts if is_root else None, part_of, 0),
            "all_to_all": lambda: mpi.Alltoall(parts, [other, num_part, kind]),
        }[operation]
