"""How ranks exchange activations: all-gathers, and sums of what each rank has computed.

A rank computes its contribution to a sum in a *room*. If the ranks are on one node, the other ranks read it there, once, and what an
all-gather collects is one array of all ranks. No message is sent. Between nodes and on GPUs the collectives do the same.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from math import prod
from typing import Any, ParamSpec, Protocol

import torch

from collectives import Communicator
from mpitrain.placement.parts import bounds
from mpitrain.tensor.node_arrays import NodeArrays

P = ParamSpec("P")


def own_part(x: torch.Tensor, comm: Communicator, dim: int) -> torch.Tensor:
    """This rank's part of dimension `dim`: a view."""
    edges = bounds(x.shape[dim], comm.size)
    return x.narrow(dim, edges[comm.rank], edges[comm.rank + 1] - edges[comm.rank])


def _timed(exchange: Callable[P, torch.Tensor]) -> Callable[P, torch.Tensor]:
    """A method of Exchange that counts its time."""

    @wraps(exchange)
    def timed(*args: P.args, **kwargs: P.kwargs) -> torch.Tensor:
        began = time.perf_counter()
        result = exchange(*args, **kwargs)
        args[0].seconds += time.perf_counter() - began  # type: ignore[attr-defined]
        return result

    return timed


class Waitable(Protocol):
    """What ranks wait for: a `Work`."""

    def wait(self) -> Any: ...


@dataclass
class Room:
    """Memory for this rank's contribution to a sum, `own`. `all`: (N, ...), those of all ranks; None if they are not in node memory."""

    own: torch.Tensor
    all: torch.Tensor | None
    fence: Waitable | None = None
    """Ends when all ranks have filled their rooms; None before this rank has filled its own."""


class SharedArrays(Protocol):
    """What an exchange needs of memory that all ranks share; see `NodeArrays`."""

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None: ...

    def fence(self) -> Waitable: ...


class Exchange:
    """The exchanges of the ranks of `comm`.

    All ranks call the same methods in the same order, with tensors of the same dtypes. `dim` counts from the end, so it is negative.
    """

    def __init__(self, comm: Communicator, arrays: SharedArrays | None = None, *, by_messages: bool = False) -> None:
        """`arrays`: memory that the ranks share; None: that of their node, if they are on one, and not `by_messages`."""
        self.comm = comm
        self._arrays = arrays
        if arrays is None and comm.num_nodes == 1 and not by_messages:
            with suppress(OSError):  # on all ranks: the node's shared memory is full, and messages do it
                self._arrays = NodeArrays(comm)
        self._posted: Room | None = None
        self.seconds = 0.0
        """The time of all exchanges so far, with the waits for other ranks. On GPUs it is the time to start them."""

    @_timed
    def gather(self, x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
        """All ranks' parts of dimension `dim`, of `length` in all. No rank may write to the result: the ranks may share it."""
        shape = list(x.shape)
        shape[dim] = length
        whole = self._take(shape, x)
        if whole is None or self._arrays is None:
            return self._gathered(x, dim, length)
        own_part(whole, self.comm, dim).copy_(x)
        self._arrays.fence().wait()
        return whole

    def room(self, shape: tuple[int, ...], like: torch.Tensor) -> Room:
        """Memory of `shape`, and of the dtype and device of `like`, for a contribution to the next sum."""
        everyone = self._take((self.comm.size, *shape), like)
        return Room(like.new_empty(shape) if everyone is None else everyone[self.comm.rank], everyone)

    def room_with(self, x: torch.Tensor) -> Room:
        """A room with the values of `x`: the one that was posted with this tensor, otherwise a new one with a copy."""
        posted, self._posted = self._posted, None
        if posted is not None and _are_one(posted.own, x):
            return posted
        room = self.room(tuple(x.shape), x)
        room.own.copy_(x)
        return room

    def post(self, room: Room) -> None:
        """This rank has filled the room. The other ranks can read it while this rank computes something else."""
        self._posted = room
        if self._arrays is not None and room.all is not None:
            room.fence = self._arrays.fence()

    @_timed
    def own_sum(self, room: Room, dim: int) -> torch.Tensor:
        """This rank's part, along `dim`, of the sum of all rooms. The caller may write to it."""
        if room.all is None:
            return self._scattered(room.own, dim)
        self._wait(room)
        return _added(own_part(room.all, self.comm, dim))

    @_timed
    def whole_sum(self, room: Room) -> torch.Tensor:
        """The sum of all rooms. The caller may write to it."""
        if room.all is None or self._arrays is None:
            return self.comm.all_reduce(room.own)
        self._wait(room)
        total = self._take(tuple(room.own.shape), room.own)
        if total is None:
            return _added(room.all)
        own_part(total.view(-1), self.comm, -1).copy_(_added(own_part(room.all.flatten(1), self.comm, -1)))
        self._arrays.fence().wait()
        return total.clone()

    def _wait(self, room: Room) -> None:
        if room.fence is None:
            assert self._arrays is not None
            room.fence = self._arrays.fence()
        room.fence.wait()

    def _take(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor | None:
        """Memory that the ranks share; None if there is none."""
        if self._arrays is None or like.device.type != "cpu":
            return None
        return self._arrays.take(shape, like.dtype)

    # By messages

    def _gathered(self, x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
        first = x.movedim(dim, 0).contiguous()
        out = first.new_empty(length, *first.shape[1:])
        self.comm.all_gather(out, first, counts=self._counts(length, first))
        return out.movedim(0, dim).contiguous()

    def _scattered(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        first = x.movedim(dim, 0).contiguous()
        counts = self._counts(len(first), first)
        out = torch.empty_like(own_part(first, self.comm, 0))
        self.comm.reduce_scatter(out, first, counts=counts)
        return out.movedim(0, dim)

    def _counts(self, length: int, rows: torch.Tensor) -> list[int]:
        """The number of elements of each rank's part of `length` rows of the shape of `rows`."""
        return [(end - begin) * prod(rows.shape[1:]) for begin, end in pairwise(bounds(length, self.comm.size))]


def _are_one(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two contiguous tensors are the same memory. Tensors without memory have storages, too, but no addresses."""
    is_place = a.storage_offset() == b.storage_offset() and a.shape == b.shape
    return is_place and a.untyped_storage() is b.untyped_storage()


def _added(contributions: torch.Tensor) -> torch.Tensor:
    """The sum over the first dimension, in order of rank. Short floating-point types are added in fp32 and rounded once."""
    if contributions.dtype not in (torch.float32, torch.float64):
        return contributions.sum(0)
    total = contributions[0] + contributions[1]  # three times as fast as `sum`
    for other in contributions[2:]:
        total += other
    return total
