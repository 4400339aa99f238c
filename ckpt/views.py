"""Arrays that are views: their elements do not lie one after the other, or torch conjugates or negates them when it reads them.

A save and a load of such an array go through a contiguous copy. Other arrays are not copied.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.arrays.buffer import is_torch


def plain(data: Any) -> Any:
    """A tensor of torch with the same values whose bytes are these values, contiguous: `data` itself if it is one."""
    return data.resolve_conj().resolve_neg().contiguous()


def shares_elements(shape: Sequence[int], strides: Sequence[int], itemsize: int = 1) -> bool:
    """Whether two elements of an array may have the same memory, as in an expanded tensor, so that it cannot be filled.

    `itemsize`: the length of an element, in the unit of `strides`.
    """
    reach = itemsize  # of the dimensions with smaller strides
    for stride, length in sorted((abs(stride), length) for stride, length in zip(strides, shape, strict=True)):
        if length > 1:
            if stride < reach:
                return 0 not in shape
            reach += (length - 1) * stride
    return False


def stand_in(data: Any, name: str, *, writable: bool) -> tuple[Any, Callable[[], Any] | None]:
    """A contiguous array in place of a view: for a save with its values; for a load with room for them, and the call that brings them
    to the view. `data` itself and None if it is no view, or an array that cannot be used at all.

    ValueError for a load into an array with elements that share memory. `name`: for messages.
    """
    if isinstance(data, np.ndarray):
        if data.flags.c_contiguous or isinstance(data, np.ma.MaskedArray):
            return data, None
        shape, strides, itemsize = data.shape, data.strides, data.itemsize
    elif is_torch(data) and data.layout == sys.modules["torch"].strided and data.is_cpu:
        if data.is_contiguous() and not data.is_conj() and not data.is_neg():
            return data, None
        shape, strides, itemsize = tuple(data.shape), data.stride(), 1
    else:
        return data, None
    if not writable:
        return (np.ascontiguousarray(data) if isinstance(data, np.ndarray) else plain(data.detach())), None
    if shares_elements(shape, strides, itemsize):
        raise ValueError(
            f"{name} cannot be filled: some of its elements share memory (shape {shape}, strides {strides}), as those of an expanded "
            "tensor do; pass an array with memory for each element"
        )
    if isinstance(data, np.ndarray):
        if not data.flags.writeable:
            raise ValueError(f"{name} is read-only; pass a writable array")
        array = np.empty(shape, data.dtype)
        return array, lambda: np.copyto(data, array)
    target = data.detach()
    room = target.new_empty(shape)
    return room, lambda: target.copy_(room)
