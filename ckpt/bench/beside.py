"""Background saves: the time for which the caller is blocked, and the slowdown of its steps during the save."""

import time
from collections.abc import Callable
from statistics import mean

import numpy as np

import ckpt
from ckpt.bench.state import Cut, Memory
from ckpt.bench.testbed import Testbed
from ckpt.saving.background import goes_on
from collectives.bench.kit.turns import Seconds

NUM_ALONE = 20  # steps without a save
_NUM_PRODUCTS, _WIDTH = 1024, 64


class Background:
    """A contestant that saves with `background=True`; the blocked time is compared with a copy of the same memory.

    The copy has a separate target, which stays unused as long as the buffer of the save: in a virtual machine, the first use after a
    minute takes up to three times as long. A step is a fixed computation: products of small matrices that together are larger than
    caches. Each product is too small for BLAS to start threads, because a rank has only one core.
    """

    def __init__(self, name: str, bed: Testbed, cuts: list[Cut]) -> None:
        self.name, self.bed, self.path = name, bed, bed.folder / name
        self._tensors = bed.source.shards(cuts)
        target = Memory(bed.source.nbytes, bed.source.rank, bed.source.size)
        self._pairs = list(zip(target.arrays(cuts).values(), bed.source.arrays(cuts).values(), strict=True))
        matrices = np.random.default_rng(0).random((_NUM_PRODUCTS, _WIDTH, _WIDTH), dtype=np.float32)
        self._factors, self._products = (matrices, matrices.copy()), np.zeros_like(matrices)

    def turn(self, round_: int) -> Seconds:
        """Copy, take steps without a save, begin a save, take steps until its end; in every other round the copy comes last."""
        bed, copies_first = self.bed, round_ % 2
        copy_s = bed.timed(self._copy, self.name) if copies_first else 0.0
        bed.comm.barrier()
        alone = self._steps(lambda done: done < NUM_ALONE)
        start = time.perf_counter()
        pause_s = bed.timed(lambda: ckpt.save(self.path, self._tensors, comm=bed.comm, background=True), self.name)
        meanwhile = self._steps(lambda done: goes_on())
        bed.comm.barrier()  # all ranks have written: the rest of the wait is part of the pause
        pause_s += bed.timed(ckpt.wait, self.name)
        whole_s = time.perf_counter() - start
        bed.remove(self.path)
        if not copies_first:
            copy_s = bed.timed(self._copy, self.name)
        return {"copy": copy_s, "pause": pause_s, "save": whole_s, "step": alone, "step meanwhile": meanwhile}

    def _copy(self) -> None:
        for target, source in self._pairs:
            np.copyto(target, source)

    def _step(self) -> float:
        start = time.perf_counter()
        np.matmul(*self._factors, out=self._products)
        return time.perf_counter() - start

    def _steps(self, go_on: Callable[[int], bool]) -> float:
        """The mean seconds of a step, not the median, because a few very slow steps cost a training as much time as many slow ones."""
        seconds = [self._step()]
        while go_on(len(seconds)):
            seconds.append(self._step())
        return mean(seconds)
