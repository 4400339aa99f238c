"""The gradients of parameters that are reduced together, and their reduction.

[Note: thawed] When a flat buffer is made, all its parameters are trained, or all are frozen. Parameters that are thawed later
(`requires_grad_(True)`) get a separate gradient buffer and a separate reduction. Shards, full parameters and the cuts between ranks
stay the same, so optimizers, averages and checkpoints are not affected. Each rank has the gradients of its own rows: if a part of a
flat buffer was thawed, one rank may have many of these rows and another rank none.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from collectives import Work
from mpitrain.placement.parts import add_gradients, part_of
from mpitrain.sharding.ranks import DataParallelRanks
from mpitrain.sharding.slices.rounds import Slices
from mpitrain.sharding.slices.sums import SliceSums
from mpitrain.sharding.unit.grad_sums import ShardSums, WaitingSums
from mpitrain.sharding.unit.layout import ShardLayout
from mpitrain.sharding.unit.parameter import ShardedParameter
from mpitrain.sharding.unit.policy import CPUOffloadPolicy


def where_shards_live(
    count: int, dtype: torch.dtype, device: torch.device, offload: CPUOffloadPolicy | None
) -> torch.Tensor:
    """Memory for `count` elements of shards: on the device of the full parameters, or in host memory with `offload`."""
    if offload is None:
        return torch.empty(count, dtype=dtype, device=device)
    return torch.empty(count, dtype=dtype, pin_memory=offload.pin_memory and device.type == "cuda")


def numbers(elements: torch.Tensor) -> torch.Tensor:
    """A view of a 1-D tensor that MPI and NCCL can reduce: complex elements become pairs of real numbers."""
    return torch.view_as_real(elements).view(-1) if elements.is_complex() else elements


class Gradients:
    """The gradients of `params`. `layout`: their extents in the gradient buffer. All ranks make the same object."""

    def __init__(
        self,
        params: Sequence[ShardedParameter],
        layout: ShardLayout,
        ranks: DataParallelRanks,
        device: torch.device,
        dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        offload: CPUOffloadPolicy | None,
        slices: Slices | None = None,
    ) -> None:
        self.params, self.layout = params, layout
        self.device, self.dtype, self.reduce_dtype = device, dtype, reduce_dtype
        self.on_host = device.type == "cpu"
        self.adopts = ranks.data_parallel.size == 1 and slices is None
        """Whether the full gradients become the gradients of the shards without a reduction: with only one rank, and without slices."""
        self.was_used = [False] * len(params)
        """For each parameter: whether this rank, and at the end of a backward any rank, had a gradient at the last reduction."""
        self.was_fresh = [False] * len(params)
        """For each parameter: whether its shard had no gradient before that reduction."""
        self.is_compressed = False
        """Whether this backward leaves the average over copies of the model to `mpitrain.sharding.compression`."""
        self.placed: set[int] = set()
        """The parameters whose gradient is in the gradient buffer and waits for the reduction."""
        self.waiting = WaitingSums(params, reduce_dtype)
        self._shard_sums = ShardSums(dtype, reduce_dtype)
        self.ranks, self._offload = ranks, offload
        width = 2 if reduce_dtype.is_complex else 1
        self._counts = [count * width for count in layout.counts]  # how many real numbers each rank's part has
        marks = [part for param in params if (part := part_of(param.full)) is not None]
        self.stage = marks[0].stage if marks and slices is not None else None
        """With slices, the stage of a pipeline whose backwards are the rounds of these gradients: one for all parameters."""
        tied = {part.tied for part in marks}
        self.is_lent = slices is not None and any(comm is not None and comm.rank > 0 for comm in tied)
        """Whether another stage of a pipeline adds these gradients up: see [Note: tied slices] in stages/tied.py."""
        bounds = [bound * width for bound in layout.bounds]
        real_dtype = reduce_dtype.to_real() if reduce_dtype.is_complex else reduce_dtype
        self.sums = (
            SliceSums(slices, ranks, bounds, real_dtype, device) if slices is not None and not self.is_lent else None
        )
        """The sums over the slices of a step; None without slices."""
        rank = ranks.shard.rank
        self._count, first = layout.counts[rank], layout.bounds[rank]
        boxes = [layout.box(index, rank) for index in range(len(params))]
        self._places = [slice(extent.start, extent.stop) for extent in layout.extents]  # in the gradient buffer
        self._rows = [
            slice(box.start - first, box.start - first + box.numel) for box in boxes
        ]  # in this rank's part of it
        parts = [(index, part_of(param.full)) for index, param in enumerate(params)]
        # Those that are sums over ranks with the same data, as norms under sequence parallelism.
        self._sums = [(index, part) for index, part in parts if part is not None and part.needs_sum]
        exact = ranks.shard, ranks.replicate, ranks.within
        is_encoded = (ranks.wired.shard, ranks.wired.replicate, ranks.wired.within) != exact
        # Elements of no parameter share a scale with their neighbours in some formats, so they must be zeros.
        self._gaps = layout.gaps if is_encoded else []
        self._reduction: Work | None = None  # a reduction under way
        self._mean: torch.Tensor | None = None  # its result
        self._left: list[torch.Tensor] = []  # of each parameter the gradient that compression averages
        self._over_copies = True  # it is over all copies of the model
        self._stream: torch.cuda.Stream | None = None  # for copies of gradients from the GPU to the host

    @property
    def is_within_step(self) -> bool:
        """Whether some rounds of a step have been added up, but not all."""
        return self.sums is not None and self.sums.num_done > 0

    @property
    def stays_full(self) -> bool:
        """Whether this backward leaves the full gradients to compression, because this rank has no others to reduce them with."""
        return self.is_compressed and self.ranks.shard.size == 1

    @torch.no_grad()
    def place_grad(self, index: int, buffer: torch.Tensor) -> None:
        """Move the full gradient of parameter `index` to its place in the gradient buffer."""
        grad, part = self.waiting.take(index), self._part(buffer, index)
        assert grad is not None
        if index in self.placed:
            part += grad.reshape(-1)
        else:
            part.copy_(grad.reshape(-1))
        self.placed.add(index)

    def _part(self, buffer: torch.Tensor, index: int) -> torch.Tensor:
        return buffer[self._places[index]]

    @torch.no_grad()
    def begin_reduction(self, buffer: torch.Tensor, *, over_copies: bool = True) -> None:
        """Begin to average the full parameters' gradients over the ranks, and drop them. Collective.

        `buffer`: 1-D, of `reduce_dtype`, at least `layout.numel` long; not to be written before `end_reduction`. `over_copies`: over
        all copies of the model; else over the ranks of this copy.
        """
        self._over_copies = over_copies
        for index in range(len(self.params)):
            waits = index in self.waiting
            is_used = waits or index in self.placed
            self.was_used[index] = is_used or (self.is_within_step and self.was_used[index])
            self._look(index)
            if waits:
                self.place_grad(index, buffer)
            elif index not in self.placed:
                self._part(buffer, index).zero_()  # this rank did not use the parameter; other ranks may have used it
        self.placed.clear()
        for gap in self._gaps:
            buffer[gap].zero_()
        if self._sums:
            add_gradients([(part, numbers(self._part(buffer, index))) for index, part in self._sums])

        grads = buffer[: self.layout.numel]
        if self.sums is not None:
            self._reduction = self.sums.begin(numbers(grads))
            return
        shard, replicate = self.ranks.wired.shard, self.ranks.wired.replicate
        if shard.size == 1:
            # Reduce within the gradient buffer, where the other ranks can read the gradients.
            self._mean = grads
            whole = replicate if over_copies else self.ranks.wired.within
            self._reduction = whole.all_reduce(numbers(grads), "avg", async_op=True)
            return
        self._mean = out = torch.empty(self._count, dtype=self.reduce_dtype, device=self.device)
        self._reduction = shard.reduce_scatter(numbers(out), numbers(grads), "avg", counts=self._counts, async_op=True)

    def _look(self, index: int) -> None:
        """Look whether the result of a reduction becomes the gradient of a shard, or is added to it."""
        shard = self.params[index].shard
        self.was_fresh[index] = shard.grad is None
        if shard.grad is None:
            self._shard_sums.reset(shard)

    def progress(self) -> None:
        """Progress a reduction that has begun, without waiting for other ranks."""
        if self._reduction is not None and self.on_host:
            self._reduction.done()

    @torch.no_grad()
    def end_reduction(self) -> None:
        """Wait for the reduction, if one has begun. The mean becomes the gradient of the shards, or is added to it. Collective."""
        if self._reduction is None:
            return
        with self._beside():
            self._reduction.wait()
            mean, self._mean, self._reduction = self._mean, None, None
            if self.sums is not None:
                if not self.sums.is_complete:
                    return
                mean = self.sums.take()
                mean = torch.view_as_complex(mean.view(-1, 2)) if self.reduce_dtype.is_complex else mean
            assert mean is not None
            if self._stream is not None:
                mean.record_stream(self._stream)
            if self.is_compressed:
                pairs = zip(self.params, self._rows, strict=True)
                self._left = [mean[mine].view(param.box.shape) for param, mine in pairs]
                return
            if self.sums is None and self._over_copies and self.ranks.shard.size > 1 and self.ranks.replicate.size > 1:
                self.ranks.wired.replicate.all_reduce(numbers(mean), "avg")
            fresh = self._of_shards(mean) if any(self.was_fresh) else mean
            for param, mine in zip(self.params, self._rows, strict=True):
                if param.shard.grad is None:
                    param.shard.grad = fresh[mine].view(param.box.shape)
                else:
                    self._shard_sums.add(param.shard, mean[mine].view(param.box.shape))

    def _of_shards(self, mean: torch.Tensor) -> torch.Tensor:
        """The result of a reduction in separate memory, with the dtype and on the device of the shards."""
        is_own = self.ranks.shard.size > 1 or self.sums is not None  # separate memory, not the gradient buffer
        if is_own and mean.dtype == self.dtype and self._offload is None:
            return mean
        there = where_shards_live(self._count, self.dtype, self.device, self._offload)
        return there.copy_(mean[: self._count], non_blocking=True)

    @contextmanager
    def _beside(self, *, after_all: bool = False) -> Iterator[None]:
        """In the block, gradients are copied from a GPU to the host in a separate stream while the GPU computes: see `end_offload`.

        `after_all`: the copies come after everything that is queued now. Otherwise `Work.wait` must order the stream.
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

    def end_offload(self) -> None:
        """Wait for copies of gradients to the host, before the host uses them."""
        if self._stream is not None:
            self._stream.synchronize()

    def abandon_reduction(self) -> None:
        """Wait for the reduction, if one has begun, and drop its result."""
        if self._reduction is not None:
            self._reduction.wait()
            self._reduction = self._mean = None
        self._left = []
        if self.sums is not None:
            self.sums.reset()

    def adopt_grads(self) -> None:
        """Make the full gradients the gradients of the shards, without a reduction, if the shards are whole parameters.

        Collective if some of them are sums over ranks with the same data.
        """
        full_grads = self._take_full()
        with self._beside(after_all=True):
            for param, grad in zip(self.params, full_grads, strict=True):
                self._adopt(param, grad)

    # With compression: `leave_full`, or `begin_reduction` and `end_reduction` over the shard group; then `take_left` and `give`

    def leave_full(self) -> None:
        """Leave the full gradients to compression. Collective as `adopt_grads`."""
        self._left = []
        for param, grad in zip(self.params, self._take_full(), strict=True):
            if grad is None:
                grad = torch.zeros_like(param.full)
            elif grad.requires_grad:  # a graph has it, and compression writes into it
                grad = grad.clone()
            self._left.append(grad.detach().view(param.box.shape))

    def take_left(self) -> list[tuple[int, torch.Tensor]]:
        """The index and the gradient of each parameter that a rank has used, after the ranks have compared `was_used`."""
        left, self._left = self._left, []
        return [(index, grad) for index, grad in enumerate(left) if self.was_used[index]]

    def give(self, index: int, mean: torch.Tensor) -> None:
        """Make the result of compression the gradient of a shard, or add it."""
        with self._beside(after_all=True):
            self._adopt(self.params[index], mean)

    def _take_full(self) -> list[torch.Tensor | None]:
        """Take the full gradients from the parameters. Collective if some are sums over ranks with the same data."""
        full_grads = [self.waiting.take(index) for index in range(len(self.params))]
        sums = []
        for index, part in self._sums:
            if (grad := full_grads[index]) is not None:
                full_grads[index] = grad = grad.to(self.reduce_dtype).contiguous()
                sums.append((part, numbers(grad.view(-1))))
        with torch.no_grad():
            add_gradients(sums)
        for index, grad in enumerate(full_grads):
            self.was_used[index] = grad is not None
            self._look(index)
        return full_grads

    def _adopt(self, param: ShardedParameter, grad: torch.Tensor | None) -> None:
        shard = param.shard
        if grad is None:
            grad = torch.zeros_like(shard)
        else:
            if self._stream is not None:
                grad.record_stream(self._stream)
            if not self.is_compressed:  # then it is in fp32
                grad = grad.to(self.reduce_dtype)
            grad = grad.resolve_conj()  # optimizers cannot use a conjugated view
            if not grad.ndim:
                grad = grad.view(param.box.shape)  # a scalar's shard has one dimension
        if shard.grad is not None:
            with torch.no_grad():
                self._shard_sums.add(shard, grad)
        elif self._offload is not None:
            there = where_shards_live(shard.numel(), self.dtype, self.device, self._offload)
            with torch.no_grad():
                shard.grad = there.view(shard.shape).copy_(grad, non_blocking=True)
        else:
            shard.grad = grad.to(self.dtype)
