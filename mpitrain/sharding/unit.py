"""A unit: parameters of one dtype in one flat buffer, cut into a shard for each rank.

[Note: kinds of tensors]
- shard: this rank's rows of a parameter, an `nn.Parameter` that the optimizer steps; what `model.parameters()` shows when idle.
- full: the whole parameter, another `nn.Parameter` that forward and backward use, shown only then. Both live as long as the unit.
- full buffer: the full parameters end to end. *Resident* in memory that all ranks of the node share, where the shards are rows of
  that very buffer (or, in mixed precision, are cast into it), so that gathering moves no bytes; or *private*: gathered from all ranks
  before use and emptied after it.
- gradient buffer: one unit's full gradients, gathered up for the reduction; the shards' gradients come out of it.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from collectives import Communicator
from collectives.dtypes import number_of
from mpitrain.sharding.layout import Box, lay_out
from mpitrain.sharding.policy import MixedPrecisionPolicy


@dataclass
class Sharded:
    """One parameter: its first name in the module it was sharded with, everyone who uses it, its two faces, this rank's box."""

    name: str
    users: list[tuple[nn.Module, str]]  # several for tied weights
    full: nn.Parameter
    shard: nn.Parameter
    box: Box
    grad: torch.Tensor | None = None  # where the shard's gradient is reduced to: a view of the unit's `shard_grad`

    def show(self, parameter: nn.Parameter) -> None:
        """Let the modules see `parameter`, one of the two."""
        for module, name in self.users:
            module._parameters[name] = parameter


class Unit:
    """Parameters of one dtype and one `requires_grad`, sharded over the ranks of `comm` together. Made on all ranks alike.

    `params`: (name, users, parameter) of each. Values come from rank 0 of `comm`; on the meta device they are left to
    `mpitrain.initialize` or a checkpoint. `resident`: see [Note: kinds of tensors].
    """

    def __init__(
        self,
        params: Sequence[tuple[str, list[tuple[nn.Module, str]], nn.Parameter]],
        comm: Communicator,
        policy: MixedPrecisionPolicy,
        device: torch.device,
        *,
        resident: bool,
    ) -> None:
        originals = [param for _, _, param in params]
        self.comm = comm
        self.resident = resident
        self.device = device
        self.dtype = originals[0].dtype
        self.trained = originals[0].requires_grad
        self.full_dtype = (policy.param_dtype if self.dtype.is_floating_point else None) or self.dtype
        self.reduce_dtype = policy.reduce_dtype or self.full_dtype
        for dtype in (self.dtype, self.full_dtype, self.reduce_dtype):
            number_of(dtype)  # what could be gathered, but not be reduced, raises here
        self.layout = lay_out([tuple(p.shape) for p in originals], comm.size)
        self.count = self.layout.counts[comm.rank]
        self._first = self.layout.bounds[comm.rank]
        self._shard_grad: torch.Tensor | None = None
        self._placed: set[int] = set()  # parameters whose gradient stands in the gradient buffer already

        if resident:
            self._full = comm.node.shared(self.layout.numel, self.full_dtype)
            whole = [_alone(self._full, p.start, p.stop) for p in self.layout.places]
        else:
            self._full = torch.empty(self.layout.numel, dtype=self.full_dtype, device=device)
            whole = [self._full[p.start : p.stop] for p in self.layout.places]
        self._shares_memory = resident and self.full_dtype == self.dtype
        if self._shares_memory:
            self._shard = _alone(self._full, self._first, self._first + self.count)
        else:
            self._shard = torch.zeros(self.count, dtype=self.dtype, device=device)

        self.params: list[Sharded] = []
        for index, (name, users, original) in enumerate(params):
            box = self.layout.box(index, comm.rank)
            begin = box.start - self._first
            part = _alone if self._shares_memory else _slice
            full = nn.Parameter(whole[index].view(original.shape), requires_grad=self.trained)
            shard = nn.Parameter(
                part(self._shard, begin, begin + box.numel).view(box.shape), requires_grad=self.trained
            )
            if not original.is_meta:
                _take_rows(shard, original, box, comm)
            shard.shard_box = full.shard_box = box  # type: ignore[attr-defined]
            self.params.append(Sharded(name, users, full, shard, box))
        self.release()
        self.show_shards()

    # Full parameters

    def show_full(self) -> None:
        """Let the modules see the full parameters."""
        for param in self.params:
            if param.shard.requires_grad and not self.trained:
                raise RuntimeError(
                    f"{param.name} was frozen when it was sharded and cannot be trained now: "
                    "set requires_grad before fully_shard"
                )
            param.full.requires_grad_(param.shard.requires_grad)
            param.show(param.full)

    def show_shards(self) -> None:
        """Let the modules see the shards."""
        for param in self.params:
            param.show(param.shard)

    def publish(self) -> None:
        """Bring this rank's rows of a resident buffer up to date with its masters. Between the fences only."""
        if self.resident and not self._shares_memory:
            self._full[self._first : self._first + self.count].copy_(self._shard)

    @torch.no_grad()
    def gather(self) -> None:
        """Fill a private full buffer from all ranks. Collective there; nothing to do if it is filled, or resident."""
        storage = self._full.untyped_storage()
        if self.resident or storage.size():
            return
        storage.resize_(self.layout.numel * self._full.itemsize)
        self.comm.all_gather(_raw(self._full), self._shard.to(self.full_dtype), counts=self.layout.counts)

    def release(self) -> None:
        """Give back the memory of a private full buffer.

        The storage stays the same object, emptied: autograd saves views of it (a Linear keeps `weight.t()`), which see the values
        again after the next `gather`. A buffer lent to several units in turn would give such views another unit's values.
        """
        if not self.resident:
            self._full.untyped_storage().resize_(0)

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
    def reduce_grads(self, buffer: torch.Tensor) -> list[bool]:
        """Average the full parameters' gradients over the ranks into the shards' and drop them. Collective.

        `buffer`: 1-D, of `reduce_dtype`, at least `layout.numel` long. A shard's gradient is added to what `zero_grad` left of
        it. Returns for each parameter whether it had a gradient on this rank.
        """
        had_grad = []
        for index, param in enumerate(self.params):
            had_grad.append(index in self._placed or param.full.grad is not None)
            if param.full.grad is not None:
                self.place_grad(index, buffer)
            elif index not in self._placed:
                self._part(buffer, index).zero_()  # unused here; other ranks may have used it
        self._placed.clear()

        if self._shard_grad is None:
            self._shard_grad = torch.zeros(self.count, dtype=self.dtype, device=self.device)
            for param in self.params:
                begin = param.box.start - self._first
                param.grad = self._shard_grad[begin : begin + param.box.numel].view(param.box.shape)
        adding = any(param.shard.grad is not None for param in self.params)
        direct = not adding and self.reduce_dtype == self.dtype
        mean = self._shard_grad if direct else torch.empty(self.count, dtype=self.reduce_dtype, device=self.device)
        self.comm.reduce_scatter(mean, buffer[: self.layout.numel], "avg", counts=self.layout.counts)
        for param in self.params:
            assert param.grad is not None
            if not direct:
                begin = param.box.start - self._first
                part = mean[begin : begin + param.box.numel].view(param.box.shape)
                if param.shard.grad is None:
                    param.grad.copy_(part)
                else:
                    param.shard.grad += part
            if param.shard.grad is None:
                param.shard.grad = param.grad
        return had_grad

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
        values = values.view(box.full_shape)
        for dim, (offset, length) in enumerate(zip(box.offset, box.shape, strict=True)):
            values = values.narrow(dim, offset, length)
        shard.copy_(values)


def _slice(flat: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return flat[start:stop]


def _alone(flat: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Elements of a resident buffer as a tensor with a version counter of its own.

    Autograd compares the counters of what it saved. Views of one tensor share theirs, so that the optimizer's step on a shard would
    look like a change of every full parameter in the buffer.
    """
    if flat.dtype == torch.bfloat16:
        return torch.from_numpy(flat.view(torch.int16).numpy()[start:stop]).view(torch.bfloat16)
    return torch.from_numpy(flat.numpy()[start:stop])


def _raw(flat: torch.Tensor) -> Any:
    """The memory of a private buffer as a NumPy array, for the time of one call; a device tensor as it is.

    Not by `Tensor.numpy()`, after which torch refuses to empty and refill the storage.
    """
    if flat.device.type != "cpu" or not flat.numel():
        return flat
    memory = (ctypes.c_uint8 * (flat.numel() * flat.itemsize)).from_address(flat.data_ptr())
    return np.ctypeslib.as_array(memory).view(number_of(flat.dtype).numpy)
