"""Adds arrays element by element, block by block so that a block stays in the core's cache."""

from collections.abc import Sequence

import numpy as np

from collectives.dtypes import DType

UFUNCS: dict[str, np.ufunc] = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
}
BLOCK = 1 << 15  # elements: a few such blocks of fp32 fit a core's L2 cache


def reduce_into(out: np.ndarray, parts: Sequence[np.ndarray], op: str, dtype: DType, *, divisor: int = 1) -> None:
    """out = parts[0] op parts[1] op ..., from left to right, divided by `divisor` at the end.

    All 1-D, of the same length and `dtype`; `out` may be one of `parts`. fp16 and bf16 are added in fp32 and rounded once.
    """
    ufunc = UFUNCS[op]
    # Overflow to infinity is a result of low precision that callers look for, not a reason to warn.
    with np.errstate(over="ignore", invalid="ignore"):
        if not dtype.is_half and divisor == 1 and len(parts) == 2:
            ufunc(parts[0], parts[1], out=out)
            return
        total = np.empty(min(BLOCK, out.size), dtype.accumulate)
        for start in range(0, out.size, BLOCK):
            stop = min(start + BLOCK, out.size)
            block = total[: stop - start]
            block[...] = parts[0][start:stop]
            for part in parts[1:]:
                ufunc(block, part[start:stop].astype(dtype.accumulate, copy=False), out=block)
            if divisor != 1:
                block /= divisor
            out[start:stop] = block


def divide(flat: np.ndarray, divisor: int, dtype: DType) -> None:
    """flat /= divisor in place, fp16 and bf16 in fp32 with one rounding."""
    if divisor != 1:
        reduce_into(flat, [flat], "sum", dtype, divisor=divisor)
