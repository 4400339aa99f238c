"""The reductions of a backward: in which order, in which buffers, and how they overlap with what is computed.

[Note: order] Reductions are collective, so all ranks issue them in one order: that of the modules, backwards. A unit whose gradients
are complete earlier waits for those before it; what was not used at all on this rank is reduced, as zeros, at the end of the
backward.

[Note: agreement] Whether a parameter is trained is the user's flag on each rank, `requires_grad`, but a reduction needs all ranks. So
where parameters are frozen, a forward that records a graph begins with a byte by which each rank says whether it has thawed some. If
one has, the ranks compare which, and reduce the gradients of those from this step on. What is frozen later stays in the order, as
zeros, so that to freeze and thaw in turn, as adversarial training does, costs nothing.

[Note: gradient buffers] The unit that is next in order moves each gradient into a buffer as soon as autograd has it, while it is in
the core's cache; any other unit (the root's head, whose gradient comes first and is reduced last) keeps its gradients where autograd
put them until its turn comes. So a buffer never holds gradients of two units. There are two in turn: while the gradients of a unit are
reduced, those of the next come into the other. A reduction that has begun is carried on, where no thread does that, whenever a
gradient comes, and its end is waited for before the next one begins: a rank that is ahead of the others by less than a unit waits for
nobody.
"""

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from mpitrain.sharding.unit.gradients import Gradients
from mpitrain.sharding.unit.ranks import Ranks
from mpitrain.sharding.unit.unit import Unit

if TYPE_CHECKING:
    from mpitrain.sharding.step.state import State


_waiting: "weakref.WeakSet[Reductions]" = weakref.WeakSet()  # those with gradients of backwards under `no_sync`


def check_reduced(params: Iterable[torch.Tensor], doing: str) -> None:
    """RuntimeError if gradients of these shards wait to be reduced still, of which `doing` would know nothing."""
    if not _waiting:
        return
    asked = {id(param) for param in params}
    for reductions in _waiting:
        for unit in reductions.units:
            if unit.has_full_grads and any(id(param.shard) in asked for param in unit.params):
                raise RuntimeError(
                    f"{doing}: gradients of backwards under no_sync wait to be reduced; run a backward outside of no_sync first, "
                    "or drop them by model.zero_grad()"
                )


class Reductions:
    """Of one model, whose sharded modules have `states`. Making it is collective."""

    def __init__(self, states: list["State"], ranks: Ranks) -> None:
        self._states = states
        self.units = [unit for state in states for unit in state.units]
        self.done: list[Gradients] = []
        """Those reduced in this backward."""
        self._ranks = ranks
        self._next = 0  # in the order: the gradients to reduce next
        self._left_some = False  # this backward, without a reduction
        self._reducing: Gradients | None = None  # whose reduction has begun
        self._buffers: dict[torch.dtype, deque[torch.Tensor]] = {}  # in host memory; the first is free
        self._take_order()

    def _take_order(self) -> None:
        self.order = [
            (state, group) for state in reversed(self._states) for unit in state.units for group in unit.gradients
        ]
        self._frozen = [(unit, index) for unit in self.units for index in unit.frozen]
        self._allocate()

    def _allocate(self) -> None:
        """In host memory two buffers for each dtype, as long as its longest gradients, where peers can read them."""
        lengths: dict[torch.dtype, list[int]] = {}
        for _, group in self.order:
            if group.on_host and not group.adopts:
                lengths.setdefault(group.reduce_dtype, []).append(group.layout.numel)
        peers = self._ranks.shard if self._ranks.shard.size > 1 else self._ranks.replicate
        for dtype, of_groups in lengths.items():
            longest, count = max(of_groups), min(len(of_groups), 2)
            there = self._buffers.get(dtype)
            if there is None or len(there) < count or there[0].numel() < longest:
                self._buffers[dtype] = deque(peers.node.empty(longest, dtype) for _ in range(count))

    def _buffer(self, group: Gradients) -> torch.Tensor:
        if not group.on_host:
            return torch.empty(group.layout.numel, dtype=group.reduce_dtype, device=group.device)
        return self._buffers[group.reduce_dtype][0]

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

    def place_grad(self, group: Gradients, index: int) -> None:
        """The gradient of parameter `index` of a group has come."""
        if self._next == len(self.order):
            return
        state, following = self.order[self._next]
        if group is following and state.sync_gradients and group.on_host and self._ranks.all.size > 1:
            group.place_grad(index, self._buffer(group))

    def advance(self) -> None:
        """Reduce what is complete and next in order."""
        while self._next < len(self.order):
            state, group = self.order[self._next]
            if not state.complete:
                return
            if state.sync_gradients:
                self._reduce(group)
            else:
                self._left_some = True
            self._next += 1

    def _reduce(self, group: Gradients) -> None:
        self.done.append(group)
        if group.adopts:
            group.adopt_grads()
            return
        self._end_one()
        group.begin_reduction(self._buffer(group))
        if group.on_host:
            self._buffers[group.reduce_dtype].rotate()
        self._reducing = group

    def _end_one(self) -> None:
        if self._reducing is not None:
            self._reducing.end_reduction()
            self._reducing = None

    def end(self) -> None:
        """The backward ends: the shards have their gradients."""
        self.advance()
        self._end_one()
        for group in self.done:
            group.finish_offload()
        if self._left_some or self in _waiting:
            (_waiting.add if any(unit.has_full_grads for unit in self.units) else _waiting.discard)(self)

    # Parameters thawed since they were sharded: see [Note: agreement]

    @property
    def has_frozen(self) -> bool:
        """Whether there are parameters whose gradients are not reduced. The same on all ranks."""
        return bool(self._frozen)

    def thawed(self) -> list[int]:
        """Numbers, the same on all ranks, of parameters whose gradients are not reduced, and which this rank has thawed."""
        return [n for n, (unit, index) in enumerate(self._frozen) if unit.params[index].shard.requires_grad]

    def name_of(self, number: int) -> str:
        """Of a parameter that `thawed` may name."""
        unit, index = self._frozen[number]
        return unit.params[index].name

    def thaw(self, numbers: Sequence[int]) -> None:
        """Reduce the gradients of these parameters, too. Not within a backward. Collective."""
        of_units: dict[Unit, list[int]] = {}
        for unit, index in (self._frozen[number] for number in numbers):
            of_units.setdefault(unit, []).append(index)
        for unit, indices in of_units.items():
            unit.thaw(indices)
        self._take_order()

    def drop(self) -> None:
        """Forget gradients of backwards that reduced nothing."""
        for unit in self.units:
            unit.drop_grads()
        _waiting.discard(self)

    def give_up(self) -> None:
        """What has begun before an exception ends, and its result is forgotten."""
        if self._reducing is not None:
            self._reducing.give_up_reduction()
            self._reducing = None
