"""Adds arrays element by element, in blocks that stay in the core's cache.

fp16 and bf16 are added in fp32 and rounded once, to nearest even: by torch's vectorised kernels if torch is loaded, else by NumPy.
Both give the same bits.
"""

import sys
import threading
from collections.abc import Sequence
from contextvars import copy_context
from typing import Any, Protocol

import numpy as np

from collectives.arrays.dtypes import DType

UFUNCS: dict[str, np.ufunc] = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
}
TORCH_UFUNCS = {"sum": "add", "avg": "add", "prod": "mul", "max": "maximum", "min": "minimum"}
BLOCK_BYTES = 1 << 19  # two blocks fit a core's L2 cache
_TORCH_PAYS = 1 << 11  # elements from which torch is faster despite the microseconds that its call takes


def mpi_agrees(op: str, dtype: np.dtype) -> bool:
    """Whether the reduction of MPI libraries gives the same bits as all other algorithms.

    Their max and min compare, and for NaN return the second operand. Open MPI's vectorised sums of 8-bit and 16-bit integers
    saturate at the largest integer instead of wrapping around.
    """
    if op in ("max", "min"):
        return dtype.kind != "f"
    return not (op == "sum" and dtype.kind in "iu" and dtype.itemsize <= 2)


class Arithmetic(Protocol):
    """The arithmetic of algorithms for one kind of memory: this module for host memory, gpu/kernels.py for GPU memory."""

    def reduce_into(self, out: np.ndarray, parts: Sequence[np.ndarray], op: str, dtype: DType) -> None: ...
    def divide(self, flat: np.ndarray, divisor: int, dtype: DType) -> None: ...
    def move(self, target: np.ndarray, source: np.ndarray) -> None: ...
    def empty(self, size: int, dtype: np.dtype) -> np.ndarray: ...


class _OfThread(threading.local):
    """The scratch memory and the NumPy context of a thread that adds."""

    def __init__(self) -> None:
        self.scratch = [np.empty(0, np.uint8)] * 2
        # Runs a function without NumPy's warnings: in low precision an overflow to infinity is a result for which callers check.
        # NumPy keeps these settings in the context; to enter a context costs a tenth of np.errstate.
        self.quietly = copy_context().run
        self.quietly(np.seterr, over="ignore", invalid="ignore")


_of_thread = _OfThread()


def reduce_into(out: np.ndarray, parts: Sequence[np.ndarray], op: str, dtype: DType, *, divisor: int = 1) -> None:
    """out = parts[0] op parts[1] op ..., from left to right, divided by `divisor` at the end.

    All arrays are 1-D, of the same length and `dtype`; `out` may be one of `parts`. fp16 and bf16 are added in fp32, rounded once.
    """
    if len(parts) == 2 and divisor == 1 and not dtype.is_half:
        _of_thread.quietly(UFUNCS[op], parts[0], parts[1], out=out)
    else:
        _of_thread.quietly(_reduce_blocks, out, parts, op, dtype, divisor)


def _reduce_blocks(out: np.ndarray, parts: Sequence[np.ndarray], op: str, dtype: DType, divisor: int) -> None:
    block, add = BLOCK_BYTES // dtype.itemsize, _add_halves if dtype.is_half else _add
    for start in range(0, out.size, block):
        stop = min(start + block, out.size)
        add(out[start:stop], [part[start:stop] for part in parts], op, dtype, divisor)


def divide(flat: np.ndarray, divisor: int, dtype: DType) -> None:
    """flat /= divisor in place, fp16 and bf16 in fp32 with one rounding."""
    if divisor != 1:
        reduce_into(flat, [flat], "sum", dtype, divisor=divisor)


def move(target: np.ndarray, source: np.ndarray) -> None:
    """target = source, of the same dtype."""
    target[...] = source


def empty(size: int, dtype: np.dtype) -> np.ndarray:
    """Memory for `size` elements."""
    return np.empty(size, dtype)


def copy(target: np.ndarray, source: np.ndarray) -> None:
    """target = source with another precision: fp16 and bf16 to fp32 exactly, fp32 to them rounded to nearest even."""
    _of_thread.quietly(_copy, target, source)


def _copy(target: np.ndarray, source: np.ndarray) -> None:
    torch = _torch(source.size)
    if torch is None:
        target[...] = source
    else:
        _tensor(torch, target).copy_(_tensor(torch, source))


def _add(out: np.ndarray, parts: Sequence[np.ndarray], op: str, dtype: DType, divisor: int) -> None:
    total = parts[0]
    if len(parts) == 1:
        out[...] = total
    # A partial sum must not overwrite a part that is added later.
    elsewhere = any(np.may_share_memory(out, part) for part in parts[2:])
    scratch = _scratch_array(0, out.size, dtype.numpy) if elsewhere else out
    for i, part in enumerate(parts[1:], 2):
        total = UFUNCS[op](total, part, out=out if i == len(parts) else scratch)
    if divisor != 1:
        out /= divisor


def _add_halves(out: np.ndarray, parts: Sequence[np.ndarray], op: str, dtype: DType, divisor: int) -> None:
    torch = _torch(out.size)
    if torch is not None and len(parts) == 2 and divisor == 1:  # torch adds in fp32 and rounds once
        one, other = (_tensor(torch, part) for part in parts)
        getattr(torch, TORCH_UFUNCS[op])(one, other, out=_tensor(torch, out))
        return
    total = _scratch_array(1, out.size, dtype.accumulate)
    _copy(total, parts[0])
    for part in parts[1:]:
        if torch is not None:
            wide = _tensor(torch, total)
            getattr(torch, TORCH_UFUNCS[op])(wide, _tensor(torch, part), out=wide)
        else:
            UFUNCS[op](total, part.astype(dtype.accumulate), out=total)
    if divisor != 1:
        total /= divisor
    _copy(out, total)


def _scratch_array(which: int, size: int, dtype: np.dtype) -> np.ndarray:
    """Scratch memory of this thread. It is kept, because new pages would cost more than the addition."""
    nbytes = size * dtype.itemsize
    if _of_thread.scratch[which].size < nbytes:
        _of_thread.scratch[which] = np.empty(max(nbytes, 1 << 12), np.uint8)
    return _of_thread.scratch[which][:nbytes].view(dtype)


def _torch(size: int) -> Any:
    """torch if it is loaded and faster for `size` elements, else None."""
    return sys.modules.get("torch") if size >= _TORCH_PAYS else None


def _tensor(torch: Any, x: np.ndarray) -> Any:
    """`x`, of fp32, fp16 or bf16, as a torch tensor without a copy; a copy if `x` is read-only, because no tensor is read-only."""
    if not x.flags.writeable:
        x = x.copy()
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)
