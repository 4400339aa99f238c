"""Arrays in the memory of a node, which its ranks see: `empty` and `shared` of a Communicator."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from collectives.arrays.buffer import like
from collectives.arrays.dtypes import dtype_of
from collectives.transports.node.memory import NodeMemory


class Allocation:
    """What a Communicator allocates. Only as a part of it, which sets these attributes."""

    size: int
    num_nodes: int
    _memory: NodeMemory | None
    _flush: Any
    _enter: Any

    def empty(self, shape: int | Sequence[int], dtype: object) -> Any:
        """An array of this rank's own that its peers on the node can read: reductions on it move each element once. Collective.

        A torch tensor for a torch dtype, else a NumPy array; zeros. All ranks pass the same shape and dtype. On a communicator of
        several nodes it is ordinary memory. OSError on all ranks if the node's shared memory is full.
        """
        return self._allocate("empty", shape, dtype)

    def shared(self, shape: int | Sequence[int], dtype: object) -> Any:
        """One array, the same memory on every rank: `comm.node.shared(...)`. Collective. Zeros.

        A torch tensor for a torch dtype, else a NumPy array. Who writes what when is the caller's to order, by `barrier()`.
        ValueError on a communicator of several nodes; OSError on all ranks if the node's shared memory is full.
        """
        if self.num_nodes > 1:
            raise ValueError(
                f"shared: these {self.size} ranks are on {self.num_nodes} nodes; call comm.node.shared(...)"
            )
        return self._allocate("shared", shape, dtype)

    def _allocate(self, kind: str, shape: int | Sequence[int], dtype: object) -> Any:
        row = dtype_of(dtype)
        shape = tuple(shape) if isinstance(shape, Sequence) else (shape,)
        if any(length < 0 for length in shape):
            raise ValueError(f"{kind}: shape {shape}; expected lengths of at least 0")
        nbytes = prod(map(int, shape)) * row.itemsize
        self._flush()
        with self._enter(kind, f"{kind}({shape}, {row.name})"):
            if self._memory is None:
                flat = np.zeros(nbytes, np.uint8)
            else:
                flat = self._memory.shared(nbytes) if kind == "shared" else self._memory.empty(nbytes)
        return like(flat.view(row.numpy), dtype).reshape(shape)
