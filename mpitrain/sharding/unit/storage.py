"""The memory of a unit's full parameters, and the all-gathers that fill it.

- `Gathered` (stage 3): gathered from all ranks before use, and freed after it. With `reshard_after_forward=N` a group of N ranks holds
  the full parameters, sharded, between forward and backward, and gathers them again.
- `Kept` (stages 0 to 2, or one rank): a copy on each rank, updated at the beginning of each outermost forward.
- `Resident`: like `Kept`, but with one copy for all ranks of a node, in shared memory. It is the default on CPUs, also in stage 3.

If the full parameters have the values of the shards, the shards of `Kept` and `Resident` are rows of this buffer. Then an optimizer
that updates the shards updates the full parameters, and no data moves within a node. With another dtype, or a wire below fp32
(ranks.py), the shards are masters in separate memory. With such a wire the full parameters have decoded values, also in this rank's own
rows, so that all ranks compute with the same bits.
"""

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np
import torch

from collectives import Communicator, Work
from collectives.arrays.dtypes import dtype_of
from mpitrain.sharding.unit.layout import Cut, lay_out
from mpitrain.torch_glue.torch_internals import with_own_counter

Kind = Literal["resident", "kept", "gathered"]


Shapes = Sequence[tuple[int, ...]]
"""The shapes of the parameters of a unit."""


class Storage:
    """The full parameters of a unit, end to end in the order of `layout`.

    `comm`: the ranks, each of which holds one shard. Its wire decides what is sent between nodes. `cut`: see `lay_out`.
    """

    kind: Kind
    lasts = True  # the full parameters stay in memory between uses
    in_place = False  # the shards are rows of the full parameters
    full_buffer: torch.Tensor

    def __init__(self, shapes: Shapes, comm: Communicator, *, cut: Cut) -> None:
        self._comm = comm
        # No rank sends resident shards, so they need not have equal lengths, and no padding.
        self.layout = layout = lay_out(shapes, comm.size, equal=self.kind != "resident", cut=cut)
        self._mine = slice(layout.bounds[comm.rank], layout.bounds[comm.rank + 1])  # this rank's rows
        self._work: Work | None = None  # an all-gather that has begun
        self._sent: torch.Tensor | None = None  # the input of the all-gather, which must stay in memory

    @property
    def nbytes(self) -> int:
        """The size of the full parameters, with or without memory."""
        return self.layout.numel * self.full_buffer.itemsize

    @property
    def overlaps(self) -> bool:
        """Whether an all-gather progresses while this rank computes. The same on all ranks."""
        return self._comm.overlaps(on_device=self.full_buffer.device.type != "cpu")

    @property
    def is_full(self) -> bool:
        """Whether the full parameters have the values of the shards, and no all-gather is under way."""
        raise NotImplementedError

    @property
    def is_under_way(self) -> bool:
        """Whether an all-gather has begun and has not ended."""
        return self._work is not None

    def begin_fill(self, shard: torch.Tensor, *, ahead: bool = True) -> None:
        """Begin to fill the full parameters, unless they are already full. Collective.

        `ahead`: if the all-gather overlaps with computation, `fill` or `end_fill` ends it. Otherwise it has ended on return.
        """
        raise NotImplementedError

    def fill(self, shard: torch.Tensor) -> bool:
        """Fill the full parameters, unless they are already full. Returns whether it filled them; if so, the call is collective."""
        if self.is_full:
            return False
        if not self.is_under_way:
            self.begin_fill(shard, ahead=False)
        self.end_fill()
        return True

    def end_fill(self) -> None:
        """Wait for an all-gather that has begun, and raise its errors."""
        if self._work is not None:
            work, self._work = self._work, None
            work.wait()
            self._sent = None

    def expire(self) -> None:
        """Mark full parameters that last as not full, because the shards may have changed."""

    def free(self, *, for_backward: bool = False) -> bool:
        """Free full parameters that do not last. Returns whether they have other memory in place of that: see `Gathered.free`."""
        return False

    def _all_gather(
        self, comm: Communicator, out: Any, mine: torch.Tensor, counts: Sequence[int], *, ahead: bool
    ) -> None:
        work = comm.all_gather(out, mine, counts=counts, async_op=ahead)
        if ahead:
            self._work, self._sent = work, mine

    def part(self, start: int, stop: int) -> torch.Tensor:
        """Elements of the buffer, with a separate version counter: autograd compares the counters of saved tensors."""
        return with_own_counter(self.full_buffer[start:stop])


class Kept(Storage):
    """A lasting copy on each rank."""

    kind: Kind = "kept"

    def __init__(
        self, shapes: Shapes, comm: Communicator, dtype: torch.dtype, device: torch.device, *, cut: Cut
    ) -> None:
        super().__init__(shapes, comm, cut=cut)
        self.full_buffer = self._allocate(dtype, device)
        self._is_stale = True

    def _allocate(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(self.layout.numel, dtype=dtype, device=device)

    @property
    def is_full(self) -> bool:
        return not self._is_stale and not self.is_under_way

    @torch.no_grad()
    def begin_fill(self, shard: torch.Tensor, *, ahead: bool = True) -> None:
        if self.is_full:
            return
        mine = self.full_buffer[self._mine]
        if not self.in_place:
            mine.copy_(shard, non_blocking=True)
        if self._moves:
            self._all_gather(self._comm, self.full_buffer, mine, self.layout.counts, ahead=ahead and self.overlaps)
        self._is_stale = False

    def expire(self) -> None:
        self._is_stale = self._moves or not self.in_place

    @property
    def _moves(self) -> bool:
        """Whether ranks must send their rows to each other."""
        return self._comm.size > 1


class Resident(Kept):
    """A copy on each node, in memory that its ranks share. [Note: fences] in changes.py tells when a rank may write to it."""

    kind: Kind = "resident"

    def __init__(
        self,
        shapes: Shapes,
        comm: Communicator,
        dtype: torch.dtype,
        device: torch.device,
        *,
        cut: Cut,
        or_anonymous: bool = False,
    ) -> None:
        """`or_anonymous`: as of `Communicator.shared`. OSError on all ranks of a node that has no memory."""
        self._or_anonymous = or_anonymous
        super().__init__(shapes, comm, dtype, device, cut=cut)

    def _allocate(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        full: torch.Tensor = self._comm.node.shared(self.layout.numel, dtype, or_anonymous=self._or_anonymous)
        return full

    @property
    def _moves(self) -> bool:
        return self._comm.num_nodes > 1


class Gathered(Storage):
    """Full parameters that are filled before use and freed after it.

    The storage stays the same object: autograd saves views of it (a Linear keeps `weight.t()`), which see the values again after the
    next fill. A buffer lent to several units in turn would give these views another unit's values.
    """

    kind: Kind = "gathered"
    lasts = False

    def __init__(
        self,
        shapes: Shapes,
        comm: Communicator,
        dtype: torch.dtype,
        device: torch.device,
        group: Communicator | None = None,
        *,
        cut: Cut,
    ) -> None:
        """`group`: the ranks that hold the full parameters together between forward and backward."""
        super().__init__(shapes, comm, cut=cut)
        self.full_buffer = torch.empty(self.layout.numel, dtype=dtype, device=device)
        self._group = group
        self._piece: torch.Tensor | None = None  # this rank's piece of the full parameters that the group holds

    @property
    def is_full(self) -> bool:
        return not self.is_under_way and self.full_buffer.untyped_storage().size() > 0

    @torch.no_grad()
    def begin_fill(self, shard: torch.Tensor, *, ahead: bool = True) -> None:
        self.full_buffer.untyped_storage().resize_(self.nbytes)
        if self._piece is None:
            mine = shard.to(self.full_buffer.device, self.full_buffer.dtype, non_blocking=True)
            self._all_gather(self._comm, _raw(self.full_buffer), mine, self.layout.counts, ahead=ahead)
        else:
            assert self._group is not None
            self._all_gather(self._group, _raw(self.full_buffer), self._piece, self._cuts(self._group)[1], ahead=ahead)

    @torch.no_grad()
    def free(self, *, for_backward: bool = False) -> bool:
        """Free the memory. `for_backward`: the full parameters will be filled again before the shards change.

        If the program has a NumPy array of a full parameter, torch neither frees nor refills the memory, which `Tensor.numpy()` has
        handed out. So the array keeps it, as do the tensors that autograd has saved. The full parameters get other memory, still to be
        freed, and the call returns True.
        """
        with suppress(Exception):  # an error of an all-gather whose result is not needed
            self.end_fill()
        if not for_backward or self._group is None:
            self._piece = None
        elif self._piece is None and self.is_full:
            starts, counts = self._cuts(self._group)
            self._piece = self.full_buffer[starts[self._group.rank] :][: counts[self._group.rank]].clone()
        if not self.full_buffer.untyped_storage().resizable():
            self.full_buffer.data = torch.empty_like(self.full_buffer)
            return True
        self.full_buffer.untyped_storage().resize_(0)
        return False

    def _cuts(self, group: Communicator) -> tuple[list[int], list[int]]:
        """The start and the length of each rank's piece. A piece may begin within a row, since no rank computes with a piece."""
        bounds = [self.layout.numel * rank // group.size for rank in range(group.size + 1)]
        return bounds[:-1], [bounds[i + 1] - bounds[i] for i in range(group.size)]


def _raw(flat: torch.Tensor) -> Any:
    """The memory of a host buffer as a NumPy array, until the storage is emptied or refilled; a device tensor as it is.

    `Tensor.numpy()` would not do: after it torch refuses to empty and refill the storage.
    """
    if flat.device.type != "cpu":
        return flat
    if not flat.numel():
        return np.empty(0, dtype_of(flat.dtype).numpy)
    memory = (ctypes.c_uint8 * (flat.numel() * flat.itemsize)).from_address(flat.data_ptr())
    memory.owner = flat  # type: ignore[attr-defined]  # lives as long as the array, which a progress thread may write to still
    return np.ctypeslib.as_array(memory).view(dtype_of(flat.dtype).numpy)
