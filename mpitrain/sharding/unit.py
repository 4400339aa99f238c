"""A unit: parameters of one dtype in one flat buffer, cut into a shard for each rank.

[Note: kinds of tensors]
- shard: this rank's rows of a parameter, an `nn.Parameter` that the optimizer steps; what `model.parameters()` shows when idle.
- full: the whole parameter, another `nn.Parameter` that forward and backward use, shown only then. Both live as long as the unit.
- full buffer: the full parameters end to end (storage.py).
- gradient buffer: one unit's full gradients, gathered up for the reduction; the shards' gradients come out of it.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from collectives import Communicator, Work
from collectives.dtypes import number_of
from mpitrain.sharding.layout import Box, Layout, lay_out, rows_of
from mpitrain.sharding.policy import CPUOffloadPolicy, MixedPrecisionPolicy
from mpitrain.sharding.ranks import Ranks
from mpitrain.sharding.storage import Storage


@dataclass
class Sharded:
    """One parameter: its first name in the module it was sharded with, everyone who uses it, its two faces, this rank's box."""

    name: str
    users: list[tuple[nn.Module, str]]  # several for tied weights
    full: nn.Parameter
    shard: nn.Parameter
    box: Box
    from_meta: bool = False  # made without values
    grad: torch.Tensor | None = None  # where the shard's gradient is reduced to: a view of the unit's `shard_grad`
    had_grad: bool = False  # on this rank, when it was last reduced
    was_fresh: bool = False  # its shard had no gradient left from before

    def __post_init__(self) -> None:
        self._memory = self.shard.data_ptr(), self.shard.dtype

    @property
    def lacks_values(self) -> bool:
        """Whether nobody has written to this rank's rows, which were made without values."""
        return self.from_meta and self.shard.numel() > 0 and self.shard._version == 0

    def check(self, shown: nn.Parameter | None) -> None:
        """RuntimeError if somebody has put another parameter in its place, or other memory behind it, which would be lost."""
        if (self.shard.data_ptr(), self.shard.dtype) != self._memory:
            raise RuntimeError(
                f"the memory of parameter {self.name} was replaced after fully_shard (by param.data = ..., or by casting or moving a "
                "part of the model), and its new values would be lost; write into it instead (with no_grad: param.copy_(...))"
            )
        if shown is not self.shard and shown is not self.full:
            raise RuntimeError(
                f"parameter {self.name} was replaced after fully_shard, and neither its shards nor its gradient would follow; "
                "replace parameters before fully_shard, or write new values into the shard (with no_grad: param.copy_(...))"
            )


class Unit:
    """Parameters of one dtype and one `requires_grad`, sharded over `ranks` together. Made on all ranks alike.

    `params`: (name, users, parameter) of each. Values come from rank 0; on the meta device they are left to `mpitrain.initialize`
    or a checkpoint. `store(layout, dtype)`: makes the Storage of the full parameters.
    """

    def __init__(
        self,
        params: Sequence[tuple[str, list[tuple[nn.Module, str]], nn.Parameter]],
        ranks: Ranks,
        policy: MixedPrecisionPolicy,
        device: torch.device,
        store: Callable[[Layout, torch.dtype], Storage],
        offload: CPUOffloadPolicy | None = None,
    ) -> None:
        originals = [param for _, _, param in params]
        self.ranks = ranks
        self.device = device
        self.on_host = device.type == "cpu"
        self.dtype = originals[0].dtype
        self.trained = originals[0].requires_grad
        self.full_dtype = (policy.param_dtype if self.dtype.is_floating_point else None) or self.dtype
        self.reduce_dtype = policy.reduce_dtype or self.full_dtype
        for dtype in (self.dtype, self.full_dtype, self.reduce_dtype):
            number_of(dtype)  # what could be gathered, but not be reduced, raises here
        comm = ranks.shard
        self.layout = lay_out([tuple(p.shape) for p in originals], comm.size)
        self.count = self.layout.counts[comm.rank]
        self._first = self.layout.bounds[comm.rank]
        self._shard_grad: torch.Tensor | None = None
        self._reduction: Work | None = None  # under way
        self._stream: torch.cuda.Stream | None = None  # on which gradients leave the GPU
        self._placed: set[int] = set()  # parameters whose gradient stands in the gradient buffer already

        self.storage = store(self.layout, self.full_dtype)
        self._offload = offload if offload is not None and offload.parts(device) else None
        self.adopts = (
            ranks.all.size == 1 and self.dtype == self.full_dtype == self.reduce_dtype and self._offload is None
        )
        """Whether the full gradients become the shards' as they are: those of one rank alone."""
        self.storage.in_place = self.storage.lasts and self.full_dtype == self.dtype and self._offload is None
        if self.storage.in_place:
            self._shard = self.storage.part(self._first, self._first + self.count)
        else:
            self._shard = self._of_shards()

        self.params: list[Sharded] = []
        for index, (name, users, original) in enumerate(params):
            box, place = self.layout.box(index, comm.rank), self.layout.places[index]
            whole = self.storage.part(place.start, place.stop)
            begin = box.start - self._first
            rows = self._shard[begin : begin + box.numel]
            full = nn.Parameter(whole.view(original.shape), requires_grad=self.trained)
            # A version counter of its own, as `Storage.part` gives it.
            shard = nn.Parameter(rows.data.view(box.shape), requires_grad=self.trained)
            if not original.is_meta:
                _take_rows(shard, original, box, ranks.all)
            shard.shard_box = full.shard_box = box  # type: ignore[attr-defined]
            self.params.append(Sharded(name, users, full, shard, box, original.is_meta))
        # Who sees a parameter where: short, since all of a model change faces twice a step and more.
        self._faces = [(module._parameters, name, param) for param in self.params for module, name in param.users]
        self._fulls = tuple(param.full for param in self.params)
        self._is_withdrawn = False
        self.release()
        self.show_shards()

    def _of_shards(self) -> torch.Tensor:
        """Zeros where the shards live, as many as they are."""
        if self._offload is None:
            return torch.zeros(self.count, dtype=self.dtype, device=self.device)
        pinned = self._offload.pin_memory and self.device.type == "cuda"
        return torch.zeros(self.count, dtype=self.dtype, pin_memory=pinned)

    # Full parameters

    def show_full(self) -> None:
        """Let the modules see the full parameters."""
        for seen, name, param in self._faces:
            param.check(seen.get(name))
            if param.shard._backward_hooks:
                raise RuntimeError(
                    f"parameter {param.name} has a hook by register_hook, which would never run: the shard is no part of the graph; "
                    "use register_post_accumulate_grad_hook, which runs at the end of a backward"
                )
            if param.full.requires_grad != param.shard.requires_grad:
                self._set_requires_grad(param)
            seen[name] = param.full

    def _set_requires_grad(self, param: Sharded) -> None:
        """The user has frozen or thawed a parameter."""
        if param.shard.requires_grad and not self.trained:
            raise RuntimeError(
                f"{param.name} was frozen when it was sharded and cannot be trained now: set requires_grad before fully_shard"
            )
        param.full.requires_grad_(param.shard.requires_grad)

    def check_owners(self) -> None:
        """RuntimeError if a module has something else in place of one of the parameters."""
        for seen, name, param in self._faces:
            param.check(seen.get(name))

    def show_shards(self) -> None:
        """Let the modules see the shards."""
        for seen, name, param in self._faces:
            seen[name] = param.shard

    @property
    def needs_refresh(self) -> bool:
        """Whether full parameters last and have to be brought up to date."""
        return self.storage.needs_refresh

    def refresh(self, *, ahead: bool = False) -> None:
        """Bring lasting full parameters up to date with the shards, `ahead` by the time of `finish_refresh`. Collective."""
        self.storage.refresh(self._shard, ahead=ahead)

    def finish_refresh(self) -> None:
        """Wait until a refresh that was begun has ended."""
        self.storage.finish()

    def gather(self) -> bool:
        """Fill full parameters that do not last. Collective where they are not full. Returns whether they were not."""
        gathered = self.storage.gather(self._shard)
        if self._is_withdrawn:
            self._is_withdrawn = False
            torch._C._autograd._unsafe_set_version_counter(
                self._fulls, tuple(full._version - 1 for full in self._fulls)
            )
        return gathered

    def begin_gather(self) -> None:
        """Begin to fill the empty full parameters: `gather` ends it. Collective."""
        self.storage.begin_gather(self._shard)

    def release(self, *, for_backward: bool = False) -> None:
        """Give the memory back of full parameters that do not last. `for_backward`: see Storage."""
        self.storage.release(for_backward=for_backward)
        if not (self.storage.lasts or self._is_withdrawn):
            # A backward that came to them now, by a way that nobody watches, would compute with no memory behind them. As long as
            # they are not gathered again, autograd takes them for changed, and raises.
            self._is_withdrawn = True
            torch.autograd.graph.increment_version(self._fulls)

    # Gradients

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

        if self._shard_grad is None or self._is_held():
            self._shard_grad = self._of_shards()
            for param in self.params:
                begin = param.box.start - self._first
                param.grad = self._shard_grad[begin : begin + param.box.numel].view(param.box.shape)
            self._num_views = torch._C._storage_Use_Count(self._shard_grad.untyped_storage()._cdata)
        grads = buffer[: self.layout.numel]
        shard, replicate = self.ranks.shard, self.ranks.replicate
        if shard.size == 1:
            # Reduced where the other ranks can read it, in the gradient buffer.
            self._reduction = replicate.all_reduce(grads, "avg", async_op=True)
            return
        out = self._shard_grad
        adding = any(param.shard.grad is not None for param in self.params)
        if adding or self.reduce_dtype != self.dtype or self._offload is not None:
            out = torch.empty(self.count, dtype=self.reduce_dtype, device=self.device)
        self._reduction = shard.reduce_scatter(out, grads, "avg", counts=self.layout.counts, async_op=True)

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
            mean = self._reduction.wait()
            if self._stream is not None:
                mean.record_stream(self._stream)
            self._reduction = None
            if self.ranks.shard.size > 1 and self.ranks.replicate.size > 1:
                self.ranks.replicate.all_reduce(mean, "avg")
            for param in self.params:
                assert param.grad is not None
                begin = param.box.start - self._first
                part = mean[begin : begin + param.box.numel].view(param.box.shape)
                if param.shard.grad is not None:
                    param.shard.grad += part.to(param.shard.device)
                    continue
                if mean is not self._shard_grad:
                    param.grad.copy_(part, non_blocking=True)
                param.shard.grad = param.grad

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Gradients that leave a GPU for the host do so beside what it computes, by a stream of their own; see `finish_offload`."""
        if self._offload is None or self.device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
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
            self._reduction = None

    def adopt_grads(self) -> None:
        """In place of a reduction: the full gradients are those of the shards, which are whole."""
        for param in self.params:
            full, shard = param.full, param.shard
            grad, before = full.grad, shard.grad
            param.had_grad, param.was_fresh = grad is not None, before is None
            if grad is None:
                grad = torch.zeros_like(shard)
            elif not grad.ndim:
                grad = grad.view(param.box.shape)  # of a scalar
            if before is None:
                shard.grad = grad
            else:
                with torch.no_grad():
                    before += grad
            full.grad = None

    @property
    def has_full_grads(self) -> bool:
        """Whether gradients wait to be reduced."""
        return bool(self._placed) or any(full.grad is not None for full in self._fulls)

    def drop_grads(self) -> None:
        """Forget full gradients that were not reduced."""
        self._placed.clear()
        for param in self.params:
            param.full.grad = None


def _take_rows(shard: nn.Parameter, original: nn.Parameter, box: Box, comm: Communicator) -> None:
    """Fill a shard from rank 0's parameter, so that models made from different seeds do not become a mixture. Collective."""
    with torch.no_grad():
        values = original.detach().contiguous()
        comm.broadcast(values)
        shard.copy_(rows_of(values, box))
