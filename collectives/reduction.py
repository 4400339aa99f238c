"""Adds arrays element by element, block by block so that a block stays in the core's cache.

fp16 and bf16 are added in fp32 and rounded once, to nearest even: by torch's vectorised kernels where torch is loaded, else by NumPy.
Both give the same bits.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.dtypes import DType

UFUNCS: dict[str, np.ufunc] = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
}
_TORCH_UFUNCS = {"sum": "add", "avg": "add", "prod": "mul", "max": "maximum", "min": "minimum"}
BLOCK_BYTES = 1 << 19  # two such blocks fit a core's L2 cache
_TORCH_PAYS = 1 << 11  # elements from which torch's kernels are worth the microseconds of handing over

# (rank, start, stop, scratch) -> those elements of its array: a view of where they lie, or `scratch`, filled
Elements = Callable[[int, int, int, np.ndarray], np.ndarray]


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.arrays = [np.empty(0, np.uint8)] * 3


_scratch = _Scratch()


def reduce_into(out: np.ndarray, parts: Sequence[np.ndarray], op: str, dtype: DType, *, divisor: int = 1) -> None:
    """out = parts[0] op parts[1] op ..., from left to right, divided by `divisor` at the end.

    All 1-D, of the same length and `dtype`; `out` may be one of `parts`. fp16 and bf16 are added in fp32 and rounded once.
    """
    reduce_blocks(out, len(parts), lambda i, start, stop, _: parts[i][start:stop], op, dtype, divisor=divisor)


def reduce_blocks(
    out: np.ndarray, num_parts: int, elements: Elements, op: str, dtype: DType, *, divisor: int = 1
) -> None:
    """`reduce_into` of parts that are fetched a block at a time: `elements(i, start, stop, scratch)` are those of part i.

    A block of `out` is written when all parts of that block have been read.
    """
    block = min(BLOCK_BYTES // dtype.itemsize, max(out.size, 1))
    add = _add_halves if dtype.is_half else _add
    # Overflow to infinity is a result of low precision that callers look for, not a reason to warn.
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, out.size, block):
            stop = min(start + block, out.size)
            add(out[start:stop], num_parts, elements, start, stop, op, dtype, divisor)


def divide(flat: np.ndarray, divisor: int, dtype: DType) -> None:
    """flat /= divisor in place, fp16 and bf16 in fp32 with one rounding."""
    if divisor != 1:
        reduce_into(flat, [flat], "sum", dtype, divisor=divisor)


def copy(target: np.ndarray, source: np.ndarray) -> None:
    """target = source, of other precision: fp16 and bf16 to fp32 exactly, back to nearest even."""
    torch = _torch(source.size)
    if torch is None:
        with np.errstate(over="ignore", invalid="ignore"):
            target[...] = source
    else:
        _tensor(torch, target).copy_(_tensor(torch, source))


def _add(
    out: np.ndarray, num_parts: int, elements: Elements, start: int, stop: int, op: str, dtype: DType, divisor: int
) -> None:
    ufunc, total = UFUNCS[op], _scratch_array(0, stop - start, dtype.numpy)
    part = elements(0, start, stop, total)
    if num_parts == 1:
        out[...] = part
    for i in range(1, num_parts):
        other = elements(i, start, stop, _scratch_array(1, stop - start, dtype.numpy))
        part = ufunc(part, other, out=out if i == num_parts - 1 else total)
    if divisor != 1:
        out /= divisor


def _add_halves(
    out: np.ndarray, num_parts: int, elements: Elements, start: int, stop: int, op: str, dtype: DType, divisor: int
) -> None:
    torch, size = _torch(stop - start), stop - start
    part = elements(0, start, stop, _scratch_array(0, size, dtype.numpy))
    if torch is not None and num_parts == 2 and divisor == 1:  # torch adds two halves in fp32 and rounds once
        other = elements(1, start, stop, _scratch_array(1, size, dtype.numpy))
        getattr(torch, _TORCH_UFUNCS[op])(_tensor(torch, part), _tensor(torch, other), out=_tensor(torch, out))
        return
    total = _scratch_array(2, size, dtype.accumulate)
    copy(total, part)
    for i in range(1, num_parts):
        part = elements(i, start, stop, _scratch_array(0, size, dtype.numpy))
        if torch is not None:
            wide = _tensor(torch, total)
            getattr(torch, _TORCH_UFUNCS[op])(wide, _tensor(torch, part), out=wide)
        else:
            UFUNCS[op](total, part.astype(dtype.accumulate), out=total)
    if divisor != 1:
        total /= divisor
    copy(out, total)


def _scratch_array(which: int, size: int, dtype: np.dtype) -> np.ndarray:
    """Scratch memory of this thread, kept: fresh pages would cost more than the addition."""
    nbytes = size * dtype.itemsize
    if _scratch.arrays[which].size < nbytes:
        _scratch.arrays[which] = np.empty(max(nbytes, 1 << 12), np.uint8)
    return _scratch.arrays[which][:nbytes].view(dtype)


def _torch(size: int) -> Any:
    """torch where it is loaded and worth it for `size` elements, else None."""
    return sys.modules.get("torch") if size >= _TORCH_PAYS else None


def _tensor(torch: Any, x: np.ndarray) -> Any:
    """`x`, of fp32, fp16 or bf16, as a torch tensor without a copy, but where it is read-only: torch knows no such tensors."""
    if not x.flags.writeable:
        x = x.copy()
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)
