"""The ranks, the memory that each contestant saves and loads, and folders in known condition."""

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from ckpt.bench.state import Memory
from collectives import Communicator
from collectives.bench.kit.turns import timed

_PIECE = 1 << 20  # elements written at a time


class Testbed(NamedTuple):
    """`source`: the memory that all contestants save. `target`: the memory for their loads. `cold`: drop the page cache before loads.

    `ended` ends resources after the measurement.
    """

    comm: Communicator
    folder: Path
    source: Memory
    target: Memory
    cold: bool
    ended: ExitStack

    def timed(self, call: Callable[[], Any], doing: str) -> float:
        """This rank's seconds in `call`, which all ranks begin together. An error of one rank is raised on all. Collective."""
        with self.comm.together(doing):
            return timed(self.comm, call)

    def warm(self) -> None:
        """Write the source to a file only in the page cache, and remove it, so that memory is in the same state for all saves.

        A virtual machine returns free memory to its host, and the next process that needs this memory waits for half a second.
        """
        values = self.source.flat
        with self.comm.together("bench"):
            scratch = self.folder / f"scratch-{self.comm.rank}"
            try:
                with open(scratch, "wb", buffering=0) as file:
                    for start in range(0, values.size, _PIECE):
                        file.write(values[start : start + _PIECE].data)
            finally:
                scratch.unlink(missing_ok=True)

    def cool(self, folder: Path) -> None:
        """If `cold`: drop the files below `folder`, which are on the disk, from the page cache."""
        if not self.cold or self.comm.node.rank != 0:
            return
        for path in filter(Path.is_file, folder.rglob("*")):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

    def remove(self, folder: Path) -> None:
        """Remove `folder` after all ranks have used it. Collective."""
        self.comm.barrier()
        with self.comm.together("bench"):
            if self.comm.rank == 0:
                shutil.rmtree(folder)
