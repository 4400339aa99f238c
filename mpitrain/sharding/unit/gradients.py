"""The gradients of one unit's parameters that are reduced together, and their reduction.

[Note: thawed] A unit's parameters are all trained or all frozen when it is made. Those thawed later (`requires_grad_(True)`) get
a gradient buffer and a reduction of their own, while shards, full parameters and the cut between ranks stay where they are. So
optimizers, averages and checkpoints need not know of it. Each rank has the gradients of the rows that it holds: where a part of a
unit was thawed, these may be many on one rank and none on another.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from collectives import Work
from mpitrain.sharding.setup.policy import CPUOffloadPolicy

if TYPE_CHECKING:
    from mpitrain.sharding.unit.unit import Sharded, Unit


def where_shards_live(
    count: int, dtype: torch.dtype, device: torch.device, offload: CPUOffloadPolicy | None
) -> torch.Tensor:
    """So many zeros, on the device of the full parameters, or in host memory where shards are offloaded."""
    if offload is None:
        return torch.zeros(count, dtype=dtype, device=device)
    return torch.zeros(count, dtype=dtype, pin_memory=offload.pin_memory and device.type == "cuda")


def numbers(elements: torch.Tensor) -> torch.Tensor:
    """A 1-D tensor as what MPI and NCCL reduce: complex elements as pairs of their parts, in the same memory."""
    return torch.view_as_real(elements).view(-1) if elements.is_complex() else elements


class Gradients:
    """Of the parameters `indices` of a unit. Made on all ranks alike."""

    def __init__(self, unit: "Unit", indices: Sequence[int]) -> None:
        self.params = [unit.params[index] for index in indices]
        self.layout = unit.layout.only(indices)
        self.adopts, self.on_host = unit.adopts, unit.on_host
        self.device, self.dtype, self.reduce_dtype = unit.device, unit.dtype, unit.reduce_dtype
        self._ranks, self._offload = unit.ranks, unit.offload
        width = 2 if self.reduce_dtype.is_complex else 1
        self._counts = [count * width for count in self.layout.counts]  # of the numbers of each rank's part
        rank = self._ranks.shard.rank
        self._count, first = self.layout.counts[rank], self.layout.bounds[rank]
        self._begins = [self.layout.box(index, rank).start - first for index in range(len(self.params))]
        self._shard_grad: torch.Tensor | None = None
        self._reduction: Work | None = None  # under way
        self._mean: torch.Tensor | None = None  # what it gives
        self._stream: torch.cuda.Stream | None = None  # on which gradients leave the GPU
        self._placed: set[int] = set()  # parameters whose gradient stands in the gradient buffer already

    @torch.no_grad()
    def place_grad(self, index: int, buffer: torch.Tensor) -> None:
        """Move the full gradient of parameter `index` to its place in the gradient buffer."""
        grad, part = self.params[index].full.grad, self._part(buffer, index)
        assert grad is not None
        if index in self._placed:
            part += grad.reshape(-1)
        else:
            part.copy_(grad.reshape(-1))
        self._placed.add(index)
        self.params[index].full.grad = None

    def _part(self, buffer: torch.Tensor, index: int) -> torch.Tensor:
        place = self.layout.places[index]
        return buffer[place.start : place.stop]

    @torch.no_grad()
    def begin_reduction(self, buffer: torch.Tensor) -> None:
        """Begin to average the full parameters' gradients over the ranks, and drop them. Collective.

        `buffer`: 1-D, of `reduce_dtype`, at least `layout.numel` long; not to be written before `end_reduction`. Sets `had_grad` and
        `was_fresh` of each parameter.
        """
        for index, param in enumerate(self.params):
            param.had_grad = index in self._placed or param.full.grad is not None
            param.was_fresh = param.shard.grad is None
            if param.full.grad is not None:
                self.place_grad(index, buffer)
            elif index not in self._placed:
                self._part(buffer, index).zero_()  # unused here; other ranks may have used it
        self._placed.clear()

        self._make_room()
        grads = buffer[: self.layout.numel]
        shard, replicate = self._ranks.shard, self._ranks.replicate
        if shard.size == 1:
            # Reduced where the other ranks can read it, in the gradient buffer.
            self._mean = grads
            self._reduction = replicate.all_reduce(numbers(grads), "avg", async_op=True)
            return
        out = self._shard_grad
        adding = any(param.shard.grad is not None for param in self.params)
        if adding or self.reduce_dtype != self.dtype or self._offload is not None:
            out = torch.empty(self._count, dtype=self.reduce_dtype, device=self.device)
        assert out is not None
        self._mean = out
        self._reduction = shard.reduce_scatter(numbers(out), numbers(grads), "avg", counts=self._counts, async_op=True)

    def _make_room(self) -> None:
        """For the shards' gradients: what holds those of the last step, unless somebody keeps them."""
        if self._shard_grad is None or self._is_held():
            self._shard_grad = where_shards_live(self._count, self.dtype, self.device, self._offload)
            for param, begin in zip(self.params, self._begins, strict=True):
                param.grad = self._shard_grad[begin : begin + param.box.numel].view(param.box.shape)
            self._num_views = torch._C._storage_Use_Count(self._shard_grad.untyped_storage()._cdata)

    def _is_held(self) -> bool:
        """Whether somebody keeps gradients of the shards that the next ones would overwrite: then those get memory of their own."""
        assert self._shard_grad is not None
        if torch._C._storage_Use_Count(self._shard_grad.untyped_storage()._cdata) > self._num_views:
            return True  # by a view of one
        # The getter's argument, and the attribute.
        return any(sys.getrefcount(param.grad) > 2 for param in self.params if param.shard.grad is not param.grad)

    def progress(self) -> None:
        """Carry a reduction on that has begun, without waiting for anyone."""
        if self._reduction is not None and self.on_host:
            self._reduction.done()

    @torch.no_grad()
    def end_reduction(self) -> None:
        """Wait for the reduction that has begun, if any, and take its result for the shards' gradients. Collective.

        A shard's gradient is added to what `zero_grad` left of it.
        """
        if self._reduction is None:
            return
        with self._beside():
            self._reduction.wait()
            mean, self._mean, self._reduction = self._mean, None, None
            assert mean is not None
            if self._stream is not None:
                mean.record_stream(self._stream)
            if self._ranks.shard.size > 1 and self._ranks.replicate.size > 1:
                self._ranks.replicate.all_reduce(numbers(mean), "avg")
            for param, begin in zip(self.params, self._begins, strict=True):
                assert param.grad is not None
                part = mean[begin : begin + param.box.numel].view(param.box.shape)
                if param.shard.grad is not None:
                    param.shard.grad += part.to(param.shard.device)
                    continue
                if mean is not self._shard_grad:
                    param.grad.copy_(part, non_blocking=True)
                param.shard.grad = param.grad

    @contextmanager
    def _beside(self, *, after_all: bool = False) -> Iterator[None]:
        """Gradients that leave a GPU for the host do so beside what it computes, by a stream of their own; see `finish_offload`.

        `after_all`: they come after all that is queued now. Else what brings them has to order that stream (`Work.wait`).
        """
        if self._offload is None or self.device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        if after_all:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield

    def finish_offload(self) -> None:
        """Before the host looks at gradients: wait for those that are on their way to it."""
        if self._stream is not None:
            self._stream.synchronize()

    def give_up_reduction(self) -> None:
        """Wait for the reduction that has begun, if any, and forget its result."""
        if self._reduction is not None:
            self._reduction.wait()
            self._reduction = self._mean = None

    def adopt_grads(self) -> None:
        """In place of a reduction: the full gradients are those of the shards, which are whole."""
        if self._offload is not None:
            self._make_room()
        with self._beside(after_all=True):
            for param in self.params:
                self._adopt(param)

    def _adopt(self, param: "Sharded") -> None:
        full, shard = param.full, param.shard
        grad, before = full.grad, shard.grad
        full.grad = None
        param.had_grad, param.was_fresh = grad is not None, before is None
        if grad is None:
            grad = torch.zeros_like(shard)
        else:
            if self._stream is not None:
                grad.record_stream(self._stream)
            grad = grad.to(self.reduce_dtype).resolve_conj()  # optimizers cannot step by one that is a view
            if not grad.ndim:
                grad = grad.view(param.box.shape)  # of a scalar
        if before is not None:
            with torch.no_grad():
                before += grad.to(before.device)
        elif self._offload is not None:
            assert param.grad is not None
            with torch.no_grad():
                shard.grad = param.grad.copy_(grad, non_blocking=True)
        else:
            shard.grad = grad.to(self.dtype)

    @property
    def has_placed(self) -> bool:
        """Whether gradients stand in the gradient buffer and were not reduced."""
        return bool(self._placed)

    def forget_placed(self) -> None:
        """Forget those."""
        self._placed.clear()
