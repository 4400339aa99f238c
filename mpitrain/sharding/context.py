"""What the units of one model share: the order of events in a step, the fences, the gradient buffers.

[Note: fences] With resident units a rank's shards are rows of parameters that its neighbours read. A shard is therefore written only
between the fence that closes every forward and backward of the outermost module and the fence that opens the next forward; the
optimizer, `load` and whoever else writes shards does it there and nowhere else. A fence is a barrier of the ranks of the node: past the
opening one all have finished writing, past the closing one all have finished reading. Ranks of other nodes read copies, which are
brought up to date by an all-gather which each rank begins before the opening fence. Where that goes on while ranks compute, a rank
waits for a unit's before the unit's module runs, and shows the full parameters then; for the rest before the closing fence. It writes
rows of other nodes alone, into the full parameters that are not in use before its end, and reads shards, which are written again past
the closing fence only. Since each rank begins it after its own writing, and it ends when all have taken part, whoever waited for it
reads what is new. Units whose module did not run in the last forward are waited for at once: others may use their parameters.

[Note: fence put off] After a forward that a backward will follow a rank passes the closing fence without waiting: it comes to the
barrier, and goes on. The fence that closes the backward stands for it. Whatever else could write shards before that (an optimizer,
an EMA, whoever asks the model for its parameters) first waits until all have come: `finish_forwards`, `settle`. Who kept a shard from
before and writes to it meanwhile gets an error, by its version counter.

[Note: order] Reductions are collective, so all ranks issue them in one order: that of the modules, backwards. A unit whose gradients
are complete earlier waits for those before it; what was not used at all on this rank is reduced, as zeros, at the end of the
backward.

[Note: complete] When has a backward brought all gradients of a module? Where full parameters last: when autograd has added up the
gradient of each parameter, which takes a hook each. Where they are freed, or where some got no gradient in the last backward: when the
gradients of the module's inputs are there, which takes an autograd function around each call. At the latest at the end of the backward.

[Note: second derivatives] A backward with create_graph=True makes a graph whose nodes use full parameters, and which a later backward
enters before it comes to the modules' outputs. So where those are freed, such a backward leaves them gathered; a forward that follows
gathers them anew. They are given back when the next forward begins after another backward has ended, which is taken for the one the
graph was made for; one that enters the graph later still, by the gradients of a module's inputs, gathers them again. The
gradients of a module are complete when those of the inputs are back in all graphs that live and were not freed.

[Note: gradient buffers] The unit that is next in order moves each gradient into a buffer as soon as autograd has it, while it is in
the core's cache; any other unit (the root's head, whose gradient comes first and is reduced last) keeps its gradients where autograd
put them until its turn comes. So a buffer never holds gradients of two units. There are two in turn: while the gradients of a unit are
reduced, those of the next come into the other. A reduction that has begun is carried on, where no thread does that, whenever a
gradient comes, and its end is waited for before the next one begins: a rank that is ahead of the others by less than a unit waits for
nobody.
"""

import time
import weakref
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

import torch

from collectives import Work
from mpitrain.sharding.prefetch import Prefetch
from mpitrain.sharding.ranks import Ranks
from mpitrain.sharding.tree import Tree
from mpitrain.sharding.unit import Unit

if TYPE_CHECKING:
    from mpitrain.sharding.state import State


_put_off: "weakref.WeakSet[Context]" = weakref.WeakSet()  # see [Note: fence put off]


def finish_forwards() -> None:
    """Before shards are written: see [Note: fence put off]. Not collective: the other ranks come to it by themselves."""
    for context in list(_put_off):
        context.settle()


class Phase(Enum):
    """Where the model is in a step."""

    IDLE = "idle"  # shards may be written
    FORWARD = "forward"
    BACKWARD = "backward"


class Context:
    """The sharded modules under one outermost module, in the order of `modules()`. Made on all ranks alike (collective)."""

    def __init__(self, states: list["State"], ranks: Ranks, tree: Tree) -> None:
        self._tree = tree
        self.ranks = ranks
        self.states = states
        self.units = [unit for state in states for unit in state.units]
        if any(state.ranks != ranks for state in states):
            raise ValueError(
                "the parts of one model are sharded over different ranks; pass the same mesh for all of them"
            )
        self.phase = Phase.IDLE
        self.makes_graph = False  # this backward: see [Note: second derivatives]
        self.has_graph = False  # it, or one before it
        self._graph_was_used = False
        self.comm_s = 0.0
        """Seconds spent in communication and in waiting for other ranks, since the beginning."""
        self._lasting = [unit for unit in self.units if unit.storage.lasts]
        self._stale = [unit for unit in self.units if unit.needs_refresh]  # after each step of the optimizer
        self._numbers = {id(unit): number for number, unit in enumerate(self.units)}
        inner = [unit.storage.nbytes for state in states[1:] for unit in state.units if not unit.storage.lasts]
        limit = states[0].prefetch_bytes
        self.prefetch = Prefetch(max(inner, default=0) if limit is None else limit)
        self._gathers = 0  # a checksum of which units were gathered since the last reduction, in order
        self._is_shared = any(unit.storage.kind == "resident" for unit in self.units) and ranks.shard.node.size > 1
        self._barrier: Work | None = None  # put off
        self._versions = 0  # of the shards at that time
        self._order = [(state, unit) for state in reversed(states) for unit in state.units if unit.trained]
        self._next = 0  # in that order: the unit to reduce next
        self._reduced: list[Unit] = []  # in this backward
        self._reducing: Unit | None = None  # its reduction has begun
        self._grad_buffers: dict[torch.dtype, deque[torch.Tensor]] = {}  # of units in host memory; the first is free
        for state in states:
            state.context = self
        # Weak: torch keeps hooks where Python's garbage collector does not look, so that a model whose hooks refer back to it
        # would stay for ever.
        this = weakref.ref(self)
        for position, (_, unit) in enumerate(self._order):
            for index, param in enumerate(unit.params):
                param.full.register_post_accumulate_grad_hook(partial(_on_grad, this, position, index))
        self._allocate_grad_buffers()

    def _allocate_grad_buffers(self) -> None:
        """In host memory two buffers for each dtype, as long as its longest unit, where peers can read them."""
        lengths: dict[torch.dtype, list[int]] = {}
        for unit in self.units:
            if unit.trained and unit.on_host and not unit.adopts:
                lengths.setdefault(unit.reduce_dtype, []).append(unit.layout.numel)
        peers = self.ranks.shard if self.ranks.shard.size > 1 else self.ranks.replicate
        for dtype, of_units in lengths.items():
            count = min(len(of_units), 2)
            self._grad_buffers[dtype] = deque(peers.node.empty(max(of_units), dtype) for _ in range(count))

    def _grad_buffer(self, unit: Unit) -> torch.Tensor:
        if unit.adopts or not unit.on_host:
            return torch.empty(0 if unit.adopts else unit.layout.numel, dtype=unit.reduce_dtype, device=unit.device)
        return self._grad_buffers[unit.reduce_dtype][0]

    def on_grad(self, position: int, index: int) -> None:
        """Autograd has added up the gradient of parameter `index` of a unit: see [Note: complete] and [Note: gradient buffers]."""
        self.begin_backward()
        state, unit = self._order[position]
        if self._reducing is not None:
            with self.communicating():
                self._reducing.progress()
        if position == self._next and state.sync_gradients and unit.on_host and self.ranks.all.size > 1:
            unit.place_grad(index, self._grad_buffer(unit))
        state.on_grad()

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """Count the time of the block as communication."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.comm_s += time.perf_counter() - start

    # Fences

    def open(self) -> None:
        """Before the outermost forward: see [Note: fences]. What an exception left behind goes first."""
        if self.phase is not Phase.IDLE:
            self.reset()
        if self._reducing is not None:  # since an exception
            self._reducing.give_up_reduction()
            self._reducing = None
        self._pass()
        self._tree.check()
        self.has_graph = self.has_graph and not self._graph_was_used
        for state in self.states:
            state.begin()
        self.phase = Phase.FORWARD
        with self.communicating():
            for unit in self._stale:
                unit.refresh(ahead=True)
            self._fence()
        for state in self.states:
            state.finish_refresh(of_idle=True)
        for unit in self._lasting:
            if not unit.storage.is_under_way:
                unit.show_full()
        with self.communicating():
            self.prefetch.begin("forward")

    def close(self, *, before_backward: bool = False) -> None:
        """After the outermost forward, which a backward may follow, and after a backward."""
        with self.communicating():
            self.prefetch.end()
            for unit in self._stale:
                unit.finish_refresh()
        for unit in self._lasting:
            unit.show_shards()
        self.phase = Phase.IDLE
        if before_backward and self._is_shared:
            self._barrier = self.ranks.shard.node.barrier(async_op=True)
            self._versions = self._count_versions()
            _put_off.add(self)
            return
        with self.communicating():
            self._fence()

    def settle(self) -> None:
        """Wait for the fence that was put off, if one was: see [Note: fence put off]."""
        if self._barrier is not None:
            with self.communicating():
                self._barrier.wait()
            self._forget_barrier()

    def _pass(self) -> None:
        """The step goes on, and nobody had to wait for the fence that was put off."""
        if self._barrier is None:
            return
        self._forget_barrier()
        if self._count_versions() != self._versions:
            raise RuntimeError(
                "parameters were written between a forward that recorded a graph and its backward, while other ranks may have been "
                "reading them; run a forward without backward under torch.no_grad(), or get the parameters to write to anew from "
                "model.parameters()"
            )

    def _forget_barrier(self) -> None:
        self._barrier = None
        _put_off.discard(self)

    def _count_versions(self) -> int:
        return sum(param.shard._version for unit in self._lasting for param in unit.params)

    def _fence(self) -> None:
        if self._is_shared:
            self.ranks.shard.node.barrier()

    def reset(self) -> None:
        """Back to idle after an exception in the middle of a step. No communication: the ranks may be anywhere."""
        for state in self.states:
            state.reset()
        self.prefetch.reset()
        self._next = 0
        self._gathers = 0
        self.phase = Phase.IDLE
        self._forget_barrier()
        self.makes_graph = self.has_graph = False

    def note_graph(self) -> None:
        """This backward makes a graph of its own: see [Note: second derivatives]."""
        self.makes_graph = self.has_graph = True

    def gather_graph(self, grad: torch.Tensor) -> None:
        """A backward enters the graph that an earlier one has made: see [Note: second derivatives]."""
        self.begin_backward()
        for state in self.states:
            state.gather_graph()

    def note_gather(self, unit: Unit) -> None:
        """This rank has gathered a unit: see `_forget_unused`."""
        self._gathers = zlib.crc32(self._numbers[id(unit)].to_bytes(4), self._gathers)
        self.prefetch.used(unit)

    # Backward

    def begin_backward(self) -> None:
        """At the first gradient that is seen of a backward."""
        if self.phase is Phase.BACKWARD:
            return
        self._pass()
        self.phase = Phase.BACKWARD
        self._next = 0
        self._reduced.clear()
        for state in self.states:
            state.begin_backward()
        for unit in self._lasting:
            unit.show_full()
        with self.communicating():
            self.prefetch.begin("backward")
        torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    def reduce_complete(self) -> None:
        """Reduce what is complete and next in order: see [Note: order]."""
        while self._next < len(self._order):
            state, unit = self._order[self._next]
            if not state.complete:
                return
            if state.sync_gradients:
                self._reduce(unit)
            self._next += 1

    def _reduce(self, unit: Unit) -> None:
        with self.communicating():
            self._end_reduction()
            unit.begin_reduction(self._grad_buffer(unit))
        if unit.on_host and not unit.adopts:
            self._grad_buffers[unit.reduce_dtype].rotate()
        self._reducing = unit
        self._reduced.append(unit)

    def _end_reduction(self) -> None:
        if self._reducing is not None:
            self._reducing.end_reduction()
            self._reducing = None

    def end_backward(self) -> None:
        """Called by the autograd engine when all gradients of a backward are there."""
        for state in self.states:
            state.end_backward()
        self._graph_was_used, self.makes_graph = not self.makes_graph, False
        self.reduce_complete()
        with self.communicating():
            self._end_reduction()
            for unit in self._reduced:
                unit.finish_offload()
        self._forget_unused()
        self._next = 0
        self.close()

    def _forget_unused(self) -> None:
        """A parameter that no rank used has no gradient, as in plain torch: an optimizer leaves it alone.

        In the same message the ranks compare which units they have gathered. Ranks that run different modules gather a mixture of
        two, with no error where both are of the same size. Copies of the shards may run different ones.
        """
        params = [param for unit in self._reduced for param in unit.params]
        if not params:
            return
        gathers = () if self.ranks.has_replicas else (*self._gathers.to_bytes(4),)
        flags = [*gathers, *(255 - byte for byte in gathers), *(param.had_grad for param in params)]
        most = torch.tensor(flags, dtype=torch.uint8)
        with self.communicating():
            self.ranks.all.all_reduce(most, "max")
        highest, lowest, used = most.tensor_split((len(gathers), 2 * len(gathers)))
        if not torch.equal(highest, 255 - lowest):
            self.reset()
            self.prefetch.forget()
            raise RuntimeError(
                "the ranks ran different sharded modules, or in different orders, and what they gathered and computed is wrong: all "
                "ranks must run the same ones in private storage; shard modules of which each rank uses others (experts) as one, by "
                "fully_shard(their_parent, units='one') first, or pass storage='resident'"
            )
        self._gathers = 0
        if not used.all():
            for param, anywhere in zip(params, used.tolist(), strict=True):
                if not anywhere and param.was_fresh:
                    param.shard.grad = None


def _on_grad(context: "weakref.ref[Context]", position: int, index: int, full: torch.Tensor) -> None:
    alive = context()
    if alive is not None:
        alive.on_grad(position, index)
