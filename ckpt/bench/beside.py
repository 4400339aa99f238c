"""Saving in the background: how long the caller stands still, and how much the steps slow down that it takes meanwhile."""

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
    """A contestant that saves with `background=True`; a copy of the same memory is the yardstick of the time that takes.

    The copy goes to memory of its own, left alone as long as the buffer of such a save: a virtual machine makes the first use after a
    minute up to three times as long. A step is a fixed computation: products of small matrices that together are larger than caches.
    Each is too small for BLAS to start threads, of which a rank has one core's worth, whatever the environment says.
    """

    def __init__(self, name: str, bed: Testbed, cuts: list[Cut]) -> None:
        self.name, self.bed, self.path = name, bed, bed.folder / name
        self._tensors = bed.source.shards(cuts)
        target = Memory(bed.source.nbytes, bed.source.rank, bed.source.size)
        self._pairs = list(zip(target.arrays(cuts).values(), bed.source.arrays(cuts).values(), strict=True))
        matrices = np.random.default_rng(0).random((_NUM_PRODUCTS, _WIDTH, _WIDTH), dtype=np.float32)
        self._factors, self._products = (matrices, matrices.copy()), np.zeros_like(matrices)

    def turn(self, round_: int) -> Seconds:
        """Copy, step alone, begin to save, step until it is done; in every other round the copy comes last."""
        bed, copies_first = self.bed, round_ % 2
        copy_s = bed.timed(self._copy, self.name) if copies_first else 0.0
        bed.comm.barrier()
        alone = self._steps(lambda done: done < NUM_ALONE)
        start = time.perf_counter()
        pause_s = bed.timed(lambda: ckpt.save(self.path, self._tensors, comm=bed.comm, background=True), self.name)
        meanwhile = self._steps(lambda done: goes_on())
        bed.comm.barrier()  # all ranks have written: what is left of waiting belongs to the pause
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
        """The mean seconds of a step: with a few very slow ones among them a training loses as much time as it does with all slow."""
        seconds = [self._step()]
        while go_on(len(seconds)):
            seconds.append(self._step())
        return mean(seconds)
