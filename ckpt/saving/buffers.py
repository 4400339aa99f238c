"""Host memory for the values of background saves. It is used again, because new memory causes page faults.

A buffer belongs to one save at a time, from `take` to `give_back`. The number of kept buffers is the number of concurrent saves.
"""

import threading
from collections.abc import Sequence

import numpy as np

from ckpt.tensors import LocalBox

_ALIGNMENT = 64

_free: list[np.ndarray] = []
_sorting = threading.Lock()


def take(boxes: Sequence[LocalBox]) -> np.ndarray:
    """Memory for the values of `boxes`: the smallest free buffer that has room, or a new one. MemoryError."""
    nbytes = sum(map(_room, boxes))
    with _sorting:
        _free.sort(key=len)
        for i, buffer in enumerate(_free):
            if buffer.size >= nbytes:
                return _free.pop(i)
        if _free:
            _free.pop()  # first return one buffer to the system
    return np.empty(nbytes, np.uint8)


def give_back(buffer: np.ndarray) -> None:
    """Free `buffer` after the end of its save."""
    with _sorting:
        _free.append(buffer)


def copied(boxes: Sequence[LocalBox], buffer: np.ndarray) -> list[LocalBox]:
    """The boxes with a copy of their current values in `buffer`, which `take` returned."""
    copies, start = [], 0
    for box in boxes:
        array = buffer[start : start + box.array.nbytes].view(box.array.dtype).reshape(box.array.shape)
        np.copyto(array, box.array)
        copies.append(LocalBox(box.box, array))
        start += _room(box)
    return copies


def _room(box: LocalBox) -> int:
    return -(-box.array.nbytes // _ALIGNMENT) * _ALIGNMENT
