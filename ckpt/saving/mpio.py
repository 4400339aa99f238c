"""Parallel HDF5: the ranks of a data file write to it together with MPI-IO, for file systems that need it, and for comparison."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from ckpt.format.errors import naming
from ckpt.format.hdf5 import h5_type, new_data_file
from ckpt.format.manifest import CHUNK_BYTES, File, checksum
from ckpt.saving.placement import DataFile
from ckpt.saving.writer import Checksums, datasets_of, describe, room_of
from ckpt.storage.local import check_room
from ckpt.tensors import LocalBox, chunks_of
from collectives.arrays.dtypes import DTYPES

_CHUNKS = 16  # in one call of HDF5: MPI libraries count bytes in 32 bits


def mpio_error(mpi: Any) -> str | None:
    """The reason why parallel HDF5 cannot be used, or None. `mpi`: mpi4py's communicator, None for one process."""
    if not h5py.get_config().mpi:
        return (
            "driver='mpio' needs an h5py that was built with parallel HDF5, and this one was not; ./mpirun/setup hdf5 builds it in a "
            "checkout of mpitrain, HDF5_MPI=ON CC=mpicc pip install --no-binary=h5py h5py with the libhdf5 of your MPI; "
            "driver='posix' needs neither and writes the same bytes"
        )
    return None if mpi is not None else "driver='mpio' needs a communicator of MPI; pass comm"


class Mpio:
    """A driver: see `Driver` in writer.py. `mpi`: the communicator of the file's ranks. `collective`: write in rounds."""

    def __init__(self, path: Path, plan: DataFile, rank: int, mpi: Any, *, collective: bool) -> None:
        self._path, self._plan, self._rank = path, plan, rank
        self._mpi, self._collective = mpi, collective
        self._datasets: dict[str, Any] = {}

    def prepare(self) -> File | None:
        """Check, on the first rank, that there is room on the disk."""
        if self._leads:
            check_room(self._path, room_of(self._plan))
        return None

    def write(self, blocks: Sequence[LocalBox], file: File | None) -> Checksums:
        """Make the file and write the rank's items into it, `blocks` in their order.

        Collective over the ranks of the file. OSError that names it.
        """
        with new_data_file(self._path, self._plan.elements, self._mpi) as opened:
            if self._leads:
                self._datasets = datasets_of(opened, self._plan)
            return self._write(blocks, opened)

    def finish(self) -> File | None:
        """The description of the complete file on its first rank; None on the others."""
        return describe(self._path, self._datasets) if self._leads else None

    @property
    def _leads(self) -> bool:
        return self._rank == self._plan.ranks[0]

    def _write(self, blocks: Sequence[LocalBox], opened: dict[str, h5py.h5d.DatasetID]) -> Checksums:
        pieces: dict[str, list[tuple[int, int, np.ndarray]]] = {dtype: [] for dtype in opened}
        for number, (block, item) in enumerate(zip(blocks, self._plan.items[self._rank], strict=True)):
            flat, step = block.array.reshape(-1), _CHUNKS * CHUNK_BYTES // DTYPES[item.dtype].itemsize
            for begin in range(0, flat.size, step):
                pieces[item.dtype].append((number, item.start + begin, flat[begin : begin + step]))
        how = h5py.h5p.create(h5py.h5p.DATASET_XFER)
        how.set_dxpl_mpio(h5py.h5fd.MPIO_COLLECTIVE if self._collective else h5py.h5fd.MPIO_INDEPENDENT)
        checksums = [""] * len(blocks)
        error: OSError | RuntimeError | None = None
        # If collective, each rank takes part in every round on every dataset: with no elements if it has none left, or has failed.
        for dtype in sorted(opened):
            mine = pieces[dtype]
            rounds = max(self._mpi.allgather(len(mine))) if self._collective else len(mine)
            for i in range(rounds):
                where = opened[dtype].get_space()
                if i < len(mine) and error is None:
                    number, start, values = mine[i]
                    checksums[number] += "".join(map(checksum, chunks_of(values, CHUNK_BYTES)))
                    where.select_hyperslab((start,), (1,), block=(values.size,))
                    memory = h5py.h5s.create_simple((values.size,))
                else:
                    values = np.empty(1, DTYPES[dtype].numpy)
                    memory = h5py.h5s.create_simple((1,))
                    where.select_none()
                    memory.select_none()
                try:
                    with naming(self._path):
                        opened[dtype].write(memory, where, values, h5_type(dtype), dxpl=how)
                except (OSError, RuntimeError) as failed:
                    error = error or failed
        if error is not None:
            raise error
        return checksums


def versions() -> tuple[str, str]:
    """The versions of h5py and of its HDF5."""
    return h5py.__version__, h5py.version.hdf5_version
