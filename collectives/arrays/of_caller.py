"""A reduction by functions of the caller, on arrays of the caller's library."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.arrays import devices
from collectives.arrays.buffer import Buffer, like
from collectives.arrays.dtypes import dtype_of


class ReductionOfCaller:
    """`reduce(arrays)` of the caller reduces parts of all ranks' `x`, one for each of `runs`, the bounds of runs of ranks.

    `combine(out, parts)` fills `out`, of the dtype `combined`, with the part of a run of several ranks. Both get tensors if `x` is a
    tensor of torch, arrays of CuPy if `x` is another array in GPU memory, and otherwise arrays of NumPy. `src`: the Buffer of `x`.
    """

    def __init__(
        self,
        x: Any,
        src: Buffer,
        reduce: Callable[[list[Any]], object],
        combine: Callable[[Any, list[Any]], object],
        runs: Sequence[tuple[int, int]],
        combined: Any,
    ) -> None:
        self._reduce, self._combine, self.runs = reduce, combine, runs
        self._dtype, self._combined, self.combined = getattr(x, "dtype", None), combined, dtype_of(combined)
        self.on_device = None if src.device is None else devices.flat_of(x)
        """`x` in GPU memory, 1-D; None in host memory."""

    def combine(self, out: np.ndarray, parts: Sequence[np.ndarray]) -> None:
        """`combine` on host memory."""
        self._combine(like(out, self._combined), [like(part, self._dtype) for part in parts])

    def reduce(self, of_runs: Sequence[np.ndarray]) -> None:
        """`reduce` on host memory: the part of each run."""
        several = [end - begin > 1 for begin, end in self.runs]
        self._reduce(
            [like(part, self._combined if has else self._dtype) for part, has in zip(of_runs, several, strict=True)]
        )

    def reduce_ranks(self, parts: Sequence[Any]) -> None:
        """`combine` and `reduce`: the parts of all ranks, in order of rank, in host memory or arrays of the library."""
        if self.on_device is None:
            parts = [like(part, self._dtype) for part in parts]
        of_runs = []
        for begin, end in self.runs:
            of_run = parts[begin]
            if end - begin > 1:
                of_run = self._empty(len(of_run))
                self._combine(of_run, list(parts[begin:end]))
            of_runs.append(of_run)
        self._reduce(of_runs)

    def _empty(self, length: int) -> Any:
        if self.on_device is None:
            return like(np.empty(length, self.combined.numpy), self._combined)
        return devices.empty_beside(self.on_device, length, self.combined)
