"""Arrays in node memory, which all ranks of a node can read: `empty` and `shared` of a Communicator."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from collectives.arrays.buffer import like
from collectives.arrays.dtypes import dtype_of
from collectives.diagnosis.recorder import Recorder
from collectives.progress.queue import AsyncQueue
from collectives.transports.node.memory import NodeMemory


class Allocation:
    """The allocations of a communicator. `memory`: the node memory that its ranks share; None if they are on several nodes."""

    def __init__(self, memory: NodeMemory | None, *, recorder: Recorder, queue: AsyncQueue) -> None:
        self._memory, self._recorder, self._queue = memory, recorder, queue

    def empty(self, shape: int | Sequence[int], dtype: object, *, or_anonymous: bool) -> Any:
        return self._allocate("empty", shape, dtype, or_anonymous)

    def shared(self, shape: int | Sequence[int], dtype: object, *, or_anonymous: bool) -> Any:
        return self._allocate("shared", shape, dtype, or_anonymous)

    def _allocate(self, kind: str, shape: int | Sequence[int], dtype: object, or_anonymous: bool) -> Any:
        row = dtype_of(dtype)
        shape = tuple(shape) if isinstance(shape, Sequence) else (shape,)
        if any(length < 0 for length in shape):
            raise ValueError(f"{kind}: shape {shape}; expected lengths of at least 0")
        nbytes = prod(map(int, shape)) * row.itemsize
        self._queue.flush()
        with self._recorder.enter(kind, f"{kind}({shape}, {row.name})"):
            if self._memory is None:
                flat = np.zeros(nbytes, np.uint8)
            else:
                allocate = self._memory.shared if kind == "shared" else self._memory.empty
                flat = allocate(nbytes, or_anonymous=or_anonymous)
        return like(flat.view(row.numpy), dtype).reshape(shape)
