"""What the units of one model share: the order of events in a step. Its parts: fences.py, reductions.py, prefetch.py.

[Note: complete] When has a backward brought all gradients of a module? Where full parameters last: when autograd has added up the
gradient of each parameter, which takes a hook each. Where they are freed, or where some got no gradient in the last backward: when the
gradients of the module's inputs are there, which takes an autograd function around each call. At the latest at the end of the backward.

[Note: second derivatives] A backward with create_graph=True makes a graph whose nodes use full parameters, and which a later backward
enters before it comes to the modules' outputs. So where those are freed, such a backward leaves them gathered; a forward that follows
gathers them anew. They are given back when the next forward begins after another backward has ended, which is taken for the one the
graph was made for; one that enters the graph later still, by the gradients of a module's inputs, gathers them again. The
gradients of a module are complete when those of the inputs are back in all graphs that live and were not freed.
"""

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mpitrain.sharding.setup.reach import check_error, check_graph
from mpitrain.sharding.setup.tree import Tree
from mpitrain.sharding.step.fences import Fence
from mpitrain.sharding.step.gather_order import Gathers
from mpitrain.sharding.step.prefetch import Prefetch
from mpitrain.sharding.step.reductions import Reductions
from mpitrain.sharding.unit.gradients import Gradients
from mpitrain.sharding.unit.ranks import Ranks
from mpitrain.sharding.unit.unit import Unit

if TYPE_CHECKING:
    from mpitrain.sharding.step.state import State


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
        self._needs_all = len(self._lasting) < len(self.units) and ranks.shard.size > 1
        self._is_graph_checked = False
        self._stale = [unit for unit in self.units if unit.needs_refresh]  # after each step of the optimizer
        inner = [unit.storage.nbytes for state in states[1:] for unit in state.units if not unit.storage.lasts]
        limit = states[0].prefetch_bytes
        self.prefetch = Prefetch(max(inner, default=0) if limit is None else limit)
        self._gathers = Gathers(self.units)
        is_shared = any(unit.storage.kind == "resident" for unit in self.units) and ranks.shard.node.size > 1
        self._shards = [param.shard for unit in self.units for param in unit.params]
        shards = [param.shard for unit in self._lasting for param in unit.params]
        self.fence = Fence(ranks.shard.node if is_shared else None, shards)
        self._reductions = Reductions(states, ranks)
        for state in states:
            state.context = self
        self._groups: list[tuple[State, Gradients]] = []  # those whose gradients are seen as they come
        self._watch_grads()

    def _watch_grads(self) -> None:
        # Weak, and by a number: torch keeps hooks where Python's garbage collector does not look, so that a model whose hooks refer
        # back to it would stay for ever.
        this = weakref.ref(self)
        watched = {id(group) for _, group in self._groups}
        for state, group in self._reductions.order:
            if id(group) in watched:
                continue
            for index, param in enumerate(group.params):
                param.full.register_post_accumulate_grad_hook(partial(_on_grad, this, len(self._groups), index))
            self._groups.append((state, group))

    def on_grad(self, number: int, index: int) -> None:
        """Autograd has added up the gradient of parameter `index` of a group: see [Note: complete]."""
        if self.phase is not Phase.BACKWARD:
            self.begin_backward()
        reductions = self._reductions
        if reductions.is_under_way:
            with self.communicating():
                reductions.progress()
        state, group = self._groups[number]
        reductions.place_grad(group, index)
        state.on_grad()

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """Count the time of the block as communication."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.comm_s += time.perf_counter() - start

    def count_writes(self) -> int:
        """A number that changes whenever somebody writes to a shard."""
        return sum(shard._version for shard in self._shards)

    # Fences

    def open(self) -> None:
        """Before the outermost forward: see [Note: fences] in fences.py. What an exception left behind goes first."""
        if self.phase is not Phase.IDLE:
            self.reset()
        self._reductions.give_up()
        self.fence.go_on()
        self._tree.check()
        self.has_graph = self.has_graph and not self._graph_was_used
        for state in self.states:
            state.begin()
        self.phase = Phase.FORWARD
        with self.communicating():
            for unit in self._stale:
                unit.refresh(ahead=True)
            if not (torch.is_grad_enabled() and self._reductions.has_frozen and self._agree()):
                self.fence.wait()
        for state in self.states:
            state.finish_refresh(of_idle=True)
        for unit in self._lasting:
            if not unit.storage.is_under_way:
                unit.show_full()
        with self.communicating():
            self.prefetch.begin("forward")

    def _agree(self) -> bool:
        """Reduce the gradients of what the ranks have thawed: see [Note: agreement] in reductions.py. Returns whether this was a fence.

        RuntimeError on all ranks if they did not all thaw the same.
        """
        reductions, comm = self._reductions, self.ranks.all
        thawed = reductions.thawed()
        anywhere = torch.tensor([bool(thawed)])
        comm.all_reduce(anywhere, "max")
        if anywhere:
            of_ranks = [set(numbers) for numbers in comm.all_gather_object(thawed)]
            if differing := set.union(*of_ranks) - set.intersection(*of_ranks):
                flags = [min(differing) in numbers for numbers in of_ranks]
                name = reductions.name_of(min(differing))
                raise RuntimeError(
                    f"parameter {name} was frozen when it was sharded; now its requires_grad is True on rank {flags.index(True)} and "
                    f"False on rank {flags.index(False)}, and the ranks could not reduce its gradient; set it on all ranks alike"
                )
            reductions.thaw(thawed)
            self._watch_grads()
            for state in self.states:
                state.count_trained()
        return self.fence.num_ranks == comm.size  # nobody is past the message before all have come to it

    def close(self, *, before_backward: bool = False, compared: bool = False) -> None:
        """After the outermost forward, which a backward may follow, and after a backward. `compared`: what the ranks gathered is."""
        with self.communicating():
            self.prefetch.end()
            for unit in self._stale:
                unit.finish_refresh()
        for unit in self._lasting:
            unit.show_shards()
        self.phase = Phase.IDLE
        if before_backward:
            self.fence.put_off()
            return
        if self._needs_all and not compared:
            self._compare_gathers()
        with self.communicating():
            self.fence.wait()

    def check_reach(self, came: Any) -> None:
        """RuntimeError if gathered parameters were used outside their module's forward: see reach.py. `came`: an output, or an error.

        Code that does so does it each time, so that the output of the first forward with a graph tells.
        """
        if not self._needs_all:
            return
        units = [unit for unit in self.units if not unit.storage.lasts]
        if isinstance(came, Exception):
            check_error(came, units, self._tree.module)
        elif not self._is_graph_checked:
            check_graph(came, units, self._tree.module)
            self._is_graph_checked = True

    def reset(self) -> None:
        """Back to idle after an exception in the middle of a step. No communication: the ranks may be anywhere."""
        for state in self.states:
            state.reset()
        self.prefetch.reset()
        self._gathers.forget()
        self.phase = Phase.IDLE
        self.fence.forget()
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
        self._gathers.note(unit)
        self.prefetch.used(unit)

    # Backward

    def begin_backward(self) -> None:
        """At the first gradient that is seen of a backward."""
        if self.phase is Phase.BACKWARD:
            return
        self.fence.go_on()
        self.phase = Phase.BACKWARD
        self._reductions.begin()
        for state in self.states:
            state.begin_backward()
        for unit in self._lasting:
            unit.show_full()
        with self.communicating():
            self.prefetch.begin("backward")
        torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    def reduce_complete(self) -> None:
        """Some module has got all its gradients."""
        with self.communicating():
            self._reductions.advance()

    def end_backward(self) -> None:
        """Called by the autograd engine when all gradients of a backward are there."""
        for state in self.states:
            state.end_backward()
        self._graph_was_used, self.makes_graph = not self.makes_graph, False
        with self.communicating():
            self._reductions.end()
        self._forget_unused()
        self.close(compared=not self.ranks.has_replicas)
        self._run_hooks()

    def drop_grads(self) -> None:
        """Forget full gradients that were not reduced."""
        self._reductions.drop()

    def _forget_unused(self) -> None:
        """A parameter that no rank used has no gradient, as in plain torch: an optimizer leaves it alone.

        In the same message the ranks compare what they have gathered, unless copies of the shards are among them.
        """
        params = [param for group in self._reductions.done for param in group.params]
        if not params:
            return
        gathers = [] if self.ranks.has_replicas else self._gathers.both_ways()
        most = torch.tensor([*gathers, *(param.had_grad for param in params)], dtype=torch.uint8)
        with self.communicating():
            self.ranks.all.all_reduce(most, "max")
        compared, used = most.tensor_split((len(gathers),))
        if gathers:
            self._check_gathers(compared)
        if not used.all():
            for param, anywhere in zip(params, used.tolist(), strict=True):
                if not anywhere and param.was_fresh:
                    param.shard.grad = None

    def _run_hooks(self) -> None:
        """Those that wait for a shard's gradient. Not earlier: they may write to shards."""
        for group in self._reductions.done:
            for param in group.params:
                hooks = param.shard._post_accumulate_grad_hooks
                if hooks and param.shard.grad is not None:
                    for hook in list(hooks.values()):
                        hook(param.shard)

    def _compare_gathers(self) -> None:
        """As `_forget_unused` does after a backward. Copies of the shards may run different modules."""
        mine = torch.tensor(self._gathers.both_ways(), dtype=torch.uint8)
        with self.communicating():
            self.ranks.shard.all_reduce(mine, "max")
        self._check_gathers(mine)

    def _check_gathers(self, most: torch.Tensor) -> None:
        try:
            self._gathers.check(most)
        except RuntimeError:
            self.reset()
            self.prefetch.forget()
            raise


def _on_grad(context: "weakref.ref[Context]", number: int, index: int, full: torch.Tensor) -> None:
    alive = context()
    if alive is not None:
        alive.on_grad(number, index)
