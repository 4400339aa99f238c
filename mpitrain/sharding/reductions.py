"""The reductions of a backward: in which order, in which buffers, and how they overlap with what is computed.

[Note: order] Reductions are collective, so all ranks issue them in one order: that of the modules, backwards. A unit whose gradients
are complete earlier waits for those before it; what was not used at all on this rank is reduced, as zeros, at the end of the
backward.

[Note: gradient buffers] The unit that is next in order moves each gradient into a buffer as soon as autograd has it, while it is in
the core's cache; any other unit (the root's head, whose gradient comes first and is reduced last) keeps its gradients where autograd
put them until its turn comes. So a buffer never holds gradients of two units. There are two in turn: while the gradients of a unit are
reduced, those of the next come into the other. A reduction that has begun is carried on, where no thread does that, whenever a
gradient comes, and its end is waited for before the next one begins: a rank that is ahead of the others by less than a unit waits for
nobody.
"""

import weakref
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from mpitrain.sharding.ranks import Ranks
from mpitrain.sharding.unit import Unit

if TYPE_CHECKING:
    from mpitrain.sharding.state import State


_waiting: "weakref.WeakSet[Reductions]" = weakref.WeakSet()  # those with gradients of backwards under `no_sync`


def check_reduced(params: Iterable[torch.Tensor], doing: str) -> None:
    """RuntimeError if gradients of these shards wait to be reduced still, of which `doing` would know nothing."""
    if not _waiting:
        return
    asked = {id(param) for param in params}
    for reductions in _waiting:
        for _, unit in reductions.order:
            if unit.has_full_grads and any(id(param.shard) in asked for param in unit.params):
                raise RuntimeError(
                    f"{doing}: gradients of backwards under no_sync wait to be reduced; run a backward outside of no_sync first, "
                    "or drop them by model.zero_grad()"
                )


class Reductions:
    """Of one model, whose sharded modules have `states`. Making it is collective."""

    def __init__(self, states: list["State"], ranks: Ranks) -> None:
        self.order = [(state, unit) for state in reversed(states) for unit in state.units if unit.trained]
        self.done: list[Unit] = []
        """Those reduced in this backward."""
        self._ranks = ranks
        self._next = 0  # in that order: the unit to reduce next
        self._left_some = False  # this backward, without a reduction
        self._reducing: Unit | None = None  # its reduction has begun
        self._buffers = self._allocate()  # of units in host memory; the first is free

    def _allocate(self) -> dict[torch.dtype, deque[torch.Tensor]]:
        """In host memory two buffers for each dtype, as long as its longest unit, where peers can read them."""
        lengths: dict[torch.dtype, list[int]] = {}
        for _, unit in self.order:
            if unit.on_host and not unit.adopts:
                lengths.setdefault(unit.reduce_dtype, []).append(unit.layout.numel)
        peers = self._ranks.shard if self._ranks.shard.size > 1 else self._ranks.replicate
        return {
            dtype: deque(peers.node.empty(max(of_units), dtype) for _ in range(min(len(of_units), 2)))
            for dtype, of_units in lengths.items()
        }

    def _buffer(self, unit: Unit) -> torch.Tensor:
        if not unit.on_host:
            return torch.empty(unit.layout.numel, dtype=unit.reduce_dtype, device=unit.device)
        return self._buffers[unit.reduce_dtype][0]

    def begin(self) -> None:
        """A backward begins."""
        self._next = 0
        self._left_some = False
        self.done.clear()

    @property
    def is_under_way(self) -> bool:
        """Whether one has begun whose end is not waited for yet."""
        return self._reducing is not None

    def progress(self) -> None:
        """Carry on the one that is under way, without waiting for anyone."""
        assert self._reducing is not None
        self._reducing.progress()

    def place_grad(self, position: int, index: int) -> None:
        """The gradient of parameter `index` of the unit at `position` in the order has come."""
        if position != self._next:
            return
        state, unit = self.order[position]
        if state.sync_gradients and unit.on_host and self._ranks.all.size > 1:
            unit.place_grad(index, self._buffer(unit))

    def advance(self) -> None:
        """Reduce what is complete and next in order."""
        while self._next < len(self.order):
            state, unit = self.order[self._next]
            if not state.complete:
                return
            if state.sync_gradients:
                self._reduce(unit)
            else:
                self._left_some = True
            self._next += 1

    def _reduce(self, unit: Unit) -> None:
        self.done.append(unit)
        if unit.adopts:
            unit.adopt_grads()
            return
        self._end_one()
        unit.begin_reduction(self._buffer(unit))
        if unit.on_host:
            self._buffers[unit.reduce_dtype].rotate()
        self._reducing = unit

    def _end_one(self) -> None:
        if self._reducing is not None:
            self._reducing.end_reduction()
            self._reducing = None

    def end(self) -> None:
        """The backward ends: the shards have their gradients."""
        self.advance()
        self._end_one()
        for unit in self.done:
            unit.finish_offload()
        if self._left_some or self in _waiting:
            (_waiting.add if any(unit.has_full_grads for _, unit in self.order) else _waiting.discard)(self)

    def drop(self) -> None:
        """Forget gradients of backwards that reduced nothing."""
        for _, unit in self.order:
            unit.drop_grads()
        _waiting.discard(self)

    def give_up(self) -> None:
        """What has begun before an exception ends, and its result is forgotten."""
        if self._reducing is not None:
            self._reducing.give_up_reduction()
            self._reducing = None
