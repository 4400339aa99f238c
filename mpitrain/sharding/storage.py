"""Where a unit's full parameters live, and how they come to be full.

- `Gathered` (stage 3): from all ranks before use, emptied after it.
- `Kept` (stages 0 to 2): a copy on each rank, brought up to date before the first forward after a step.
- `Resident`: as `Kept`, but one copy for all ranks of a node, in memory that they share: so it is stage 3 as well.

Where the full parameters have the dtype of the shards, the shards of `Kept` and `Resident` are rows of that very buffer: an optimizer
that steps them steps the full parameters, and within a node nothing is left to move.
"""

import ctypes
from typing import Any, Literal

import numpy as np
import torch

from collectives import Communicator
from collectives.dtypes import number_of
from mpitrain.sharding.layout import Layout

Kind = Literal["resident", "kept", "gathered"]


class Storage:
    """The full parameters of a unit, end to end as `layout` says, in `dtype`. `comm`: the ranks that hold a shard each."""

    kind: Kind
    lasts = True  # the full parameters stay in memory between uses
    flat: torch.Tensor

    def __init__(self, layout: Layout, comm: Communicator) -> None:
        self._layout, self._comm = layout, comm
        self._mine = slice(layout.bounds[comm.rank], layout.bounds[comm.rank + 1])  # this rank's rows

    def part(self, start: int, stop: int) -> torch.Tensor:
        """Elements of the buffer as a tensor with a version counter of its own.

        Autograd compares the counters of what it saved. Views of one tensor share theirs, so that the optimizer's step on a shard, or
        a gather, would look like a change of every full parameter in the buffer.
        """
        return self.flat[start:stop].data

    def needs_refresh(self, shard: torch.Tensor) -> bool:
        """Whether lasting full parameters do not change with the shards by themselves."""
        return False

    def refresh(self, shard: torch.Tensor) -> None:
        """The shards have changed: bring the full parameters up to date, those that last. Collective."""

    def gather(self, shard: torch.Tensor) -> bool:
        """Fill the full parameters, unless they are. Collective where they are not lasting. Returns whether something was gathered."""
        return False

    def release(self) -> None:
        """Give the memory back of those that do not last."""


class Kept(Storage):
    """A copy on each rank that lasts."""

    kind: Kind = "kept"

    def __init__(self, layout: Layout, comm: Communicator, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(layout, comm)
        self.flat = self._allocate(dtype, device)

    def _allocate(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(self._layout.numel, dtype=dtype, device=device)

    def needs_refresh(self, shard: torch.Tensor) -> bool:
        return self._moves or self.flat.dtype != shard.dtype

    @torch.no_grad()
    def refresh(self, shard: torch.Tensor) -> None:
        mine = self.flat[self._mine]
        if self.flat.dtype != shard.dtype:
            mine.copy_(shard)
        if self._moves:
            self._comm.all_gather(self.flat, mine, counts=self._layout.counts)

    @property
    def _moves(self) -> bool:
        """Whether a rank's rows have to be sent to reach the others."""
        return self._comm.size > 1


class Resident(Kept):
    """A copy on each node, in memory that its ranks share. What is written there when: see [Note: fences] in context.py."""

    kind: Kind = "resident"

    def _allocate(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        flat: torch.Tensor = self._comm.node.shared(self._layout.numel, dtype)
        return flat

    @property
    def _moves(self) -> bool:
        return self._comm.num_nodes > 1


class Gathered(Storage):
    """Filled before use and emptied after it.

    The storage stays the same object: autograd saves views of it (a Linear keeps `weight.t()`), which see the values again after the
    next `gather`. A buffer lent to several units in turn would give such views another unit's values.
    """

    kind: Kind = "gathered"
    lasts = False

    def __init__(self, layout: Layout, comm: Communicator, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(layout, comm)
        self.flat = torch.empty(layout.numel, dtype=dtype, device=device)

    @torch.no_grad()
    def gather(self, shard: torch.Tensor) -> bool:
        storage = self.flat.untyped_storage()
        if storage.size():
            return False
        storage.resize_(self._layout.numel * self.flat.itemsize)
        self._comm.all_gather(_raw(self.flat), shard.to(self.flat.dtype), counts=self._layout.counts)
        return True

    def release(self) -> None:
        self.flat.untyped_storage().resize_(0)


def _raw(flat: torch.Tensor) -> Any:
    """The memory of a host buffer as a NumPy array, for the time of one call; a device tensor as it is.

    Not by `Tensor.numpy()`, after which torch refuses to empty and refill the storage.
    """
    if flat.device.type != "cpu" or not flat.numel():
        return flat
    memory = (ctypes.c_uint8 * (flat.numel() * flat.itemsize)).from_address(flat.data_ptr())
    return np.ctypeslib.as_array(memory).view(number_of(flat.dtype).numpy)
