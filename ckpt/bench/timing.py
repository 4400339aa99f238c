"""The rounds: each contestant's turn in each, in an order that is drawn anew."""

import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np

from ckpt.bench.results import Row
from collectives import Communicator
from collectives.bench.timing import turns

_PIECE = 1 << 20  # elements that are written at a time

Seconds = dict[str, float]
"""Of this rank, by what was done: see `Row.action`."""


class Turn:
    """What a contestant needs in a round. `checks`: whether it looks at what it has loaded, which takes time."""

    def __init__(self, comm: Communicator, round_: int, *, cold: bool) -> None:
        self.comm, self.number, self.checks, self._cold = comm, round_, round_ == 0, cold

    def timed(self, call: Callable[[], Any], doing: str) -> float:
        """This rank's seconds in `call`, which all ranks begin at the same time. An error of one rank is one of all. Collective."""
        self.comm.barrier()
        with self.comm.together(doing):
            start = time.perf_counter()
            call()
            seconds = time.perf_counter() - start
        return seconds

    def warm(self, folder: Path, values: np.ndarray) -> None:
        """Write them to a file in the page cache alone, and remove it: what is saved next finds memory as everybody else's does.

        A virtual machine gives free memory back to its host, and whoever is the next to need it waits for half a second.
        """
        with self.comm.together("bench"):
            scratch = folder / f"scratch-{self.comm.rank}"
            try:
                with open(scratch, "wb", buffering=0) as file:
                    for start in range(0, values.size, _PIECE):
                        file.write(values[start : start + _PIECE].data)
            finally:
                scratch.unlink(missing_ok=True)

    def cool(self, folder: Path) -> None:
        """Drop the files below `folder` from the page cache, if that was asked for. They are on the disk by now."""
        if not self._cold or self.comm.node.rank != 0:
            return
        for path in filter(Path.is_file, folder.rglob("*")):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

    def remove(self, folder: Path) -> None:
        """When all ranks are done with it. Collective."""
        self.comm.barrier()
        with self.comm.together("bench"):
            if self.comm.rank == 0:
                shutil.rmtree(folder)


class Contestant(Protocol):
    """Who takes part: `turn` does all that it has to do, once."""

    name: str

    def turn(self, turn: Turn) -> Seconds: ...


def measure(contestants: Sequence[Contestant], comm: Communicator, *, rounds: int, cold: bool) -> list[Row]:
    """Let them take turns, and once more before, which does not count. Collective: the rows are the same on all ranks."""
    slowest: dict[tuple[str, str], list[float]] = {}
    for round_ in range(1 + rounds):
        for i in turns(round_, len(contestants)):
            one = contestants[i]
            everyone = comm.all_gather_object(one.turn(Turn(comm, round_, cold=cold)))
            for action in everyone[0] if round_ else ():
                slowest.setdefault((one.name, action), []).append(max(seconds[action] for seconds in everyone))
    order = [one.name for one in contestants]
    rows = [Row(*key, median(seconds), min(seconds), max(seconds)) for key, seconds in slowest.items()]
    return sorted(rows, key=lambda row: order.index(row.contestant))
