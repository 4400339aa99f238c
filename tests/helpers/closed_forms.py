"""What ranks contribute to a reduction by a formula of element and rank, and what comes of it: exact in every dtype, bf16 too."""

import numpy as np

from collectives.arrays.dtypes import DType


def inputs(op: str, row: DType, size: int, rank: int) -> np.ndarray:
    """What `rank` contributes: element i by a formula of i and rank."""
    i = np.arange(size)
    if row.name == "bool":
        return (i + rank) % 3 > 0 if op in ("prod", "min") else (i + rank) % 5 == 0
    if op == "prod":
        return (1 + (i + rank) % 2).astype(row.numpy)
    return ((i * (rank + 1)) % 5 + rank + 1).astype(row.numpy)


def reduced(op: str, row: DType, size: int, n: int) -> np.ndarray:
    """The reduction of all ranks' `inputs`, in fp64, where each partial result is exact."""
    parts = np.stack([inputs(op, row, size, rank).astype(np.float64) for rank in range(n)])
    match op:
        case "sum":
            total = parts.max(0) if row.name == "bool" else parts.sum(0)
        case "avg":
            # One division in the type that the reduction adds in, and one rounding.
            return (parts.sum(0).astype(row.accumulate) / row.accumulate.type(n)).astype(row.numpy)
        case "prod":
            total = parts.prod(0)
        case "max":
            total = parts.max(0)
        case "min":
            total = parts.min(0)
    return total.astype(row.numpy)
