"""The step of one sharded model: its phase, and the order in which its units are unsharded, resharded and reduced.

A parameter between two forwards (unit/storage.py says which full parameters are gathered, and which last):
1. The outermost forward begins with `open`: full parameters that last are filled from the shards and shown, if that needs no
   all-gather.
2. `ShardedModule.__call__` calls `forward`. `_unshard` fills all other full parameters of the module, and the module shows them.
3. After the module's own forward `_reshard` shows the shards again and frees gathered full parameters, unless `reshard_after_forward`
   keeps them, or a part of them. Those of the outermost module stay, because the backward begins there. `close` shows the shards of the
   full parameters that last after the outermost forward.
4. A backward follows a route ([Note: route] in route.py). `_begin_backward` unshards the units that last. Before the backward comes
   into a call of a module, `_enter` unshards any other unit. `_complete` or `_end_backward` reshards them, and `close` those that last.
5. The optimizer writes the shards, those in resident memory after a fence (fences.py). The next forward fills full parameters.

A gradient between autograd and the optimizer:
1. autograd stores the full gradient in `.grad` of the full parameter, and its hook calls `on_gradient`.
2. On CPUs `Reducer.take` moves the gradient into the gradient buffer if its unit is next in the order of reductions. On a GPU the
   next step does so.
3. When the unit is complete ([Note: complete] in reducer.py), `Reducer.complete` begins a reduce-scatter (`Gradients.begin_reduction`),
   or an all-reduce where shards are whole. The backward continues. Gradients that are sums over `tp` ranks are added up before it.
   With `compress_gradients` see [Note: compressed] in reducer.py.
4. `Gradients.end_reduction` makes this rank's rows of the mean the `.grad` of the shards, or adds them to it. `_end_backward` waits for
   the last reduction. The optimizer then finds the shards and their gradients in `model.parameters()`.

[Note: second derivatives] A backward with create_graph=True makes a graph that uses full parameters. After such a backward the full
parameters stay until an optimizer updates them, until `reshard()`, or until another backward has ended, which counts as the backward
through that graph, and the next forward begins. A later backward through the graph raises torch's error for modified tensors.
"""

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn

from collectives import Communicator
from mpitrain.models.draws import mark_places, seeded_at_places
from mpitrain.parts import stage_of
from mpitrain.sharding.slices.buffers import SliceBuffers
from mpitrain.sharding.step.arguments import aligned, cast, tensors_in
from mpitrain.sharding.step.fences import Fence
from mpitrain.sharding.step.gather_order import Gathers
from mpitrain.sharding.step.nodes import Call, Place, forget_calls
from mpitrain.sharding.step.prefetch import Prefetch
from mpitrain.sharding.step.reach import check_error, check_graph, outside
from mpitrain.sharding.step.reducer import Reducer
from mpitrain.sharding.step.reruns import Reruns
from mpitrain.sharding.step.route import Route, find_routes
from mpitrain.sharding.step.same_inputs import SameInputs
from mpitrain.sharding.step.tree import Tree
from mpitrain.sharding.unit.gradients import Gradients
from mpitrain.sharding.unit.ranks import DataParallelRanks, is_within
from mpitrain.sharding.unit.registry import unit_of
from mpitrain.sharding.unit.unit import Unit, UnitState
from mpitrain.torch_internals import (
    at_end_of_backward,
    count_writes,
    in_backward,
    outdate,
    run_accumulation_hooks,
)


class Phase(Enum):
    """The pass that a model is in."""

    IDLE = "shards may be written"
    FORWARD = "forward"
    BACKWARD = "backward"


class Graph(Enum):
    """Whether full parameters stay for the graph of a backward: see [Note: second derivatives]."""

    NONE = "no backward has made a graph"
    LIVE = "a backward made a graph, and full parameters stay"
    USED = "another backward has ended since: the next forward gives the full parameters back"


class TrainingStep:
    """The step of the units under one outermost module, `root`. `units`: in the order of `root.modules()`. Collective."""

    def __init__(self, root: nn.Module, units: list[Unit], ranks: DataParallelRanks) -> None:
        whole = ranks.data_parallel
        for part in (unit.ranks.data_parallel for unit in units):
            if not is_within(part, whole):
                raise ValueError(
                    f"a part of a model is sharded over {part.size} ranks that are not all among the {whole.size} ranks "
                    "of the whole; pass the mesh of the whole, or another mesh of the same ranks"
                )
        self.ranks = ranks
        self.units = units
        self.phase = Phase.IDLE
        self.comm_s = 0.0
        """Seconds that were spent in communication and in waits for other ranks."""
        self.num_backwards = 0
        """The backwards so far. With slices: the rounds, see [Note: rounds] in reducer.py."""
        self._tree = Tree(root)
        self._graph = Graph.NONE
        self._makes_graph = False  # whether this backward makes a graph
        self._held: set[Unit] = set()  # units that stay full until `let_go`
        self._running: set[Unit] = set()  # units whose modules' calls have not returned
        self._ran: set[Unit] = set()  # units whose modules ran in this forward, or in the last one
        self.places: dict[int, Place] = {}
        """Where the gradient of a full parameter belongs, by the `id` of the parameter."""
        self._routes: list[Route] = []  # of the backward under way, and of backwards within it
        self._reruns = Reruns()
        self._writes: int | None = None  # the count of writes to the shards at the last forward
        self._lasting = [unit for unit in units if unit.lasts]
        self._passing = [unit for unit in units if not unit.lasts]
        self._compares = bool(self._passing) and ranks.shard.size > 1
        self._is_reach_checked = not self._compares
        limit = units[0].prefetch_bytes
        self._prefetch = Prefetch(max((unit.nbytes for unit in units[1:]), default=0) if limit is None else limit)
        self._gathers = Gathers(units)
        self._shards = [param.shard for unit in units for param in unit.params]
        shared = any(flat.storage.kind == "resident" for unit in units for flat in unit.flats)
        readers = (
            ranks.shard if all(is_within(unit.ranks.shard, ranks.shard) for unit in units) else ranks.data_parallel
        )
        self._fence = Fence(
            readers.node if shared and readers.node.size > 1 else None,
            [param.shard for unit in self._lasting for param in unit.params],
        )
        self.reducer = Reducer(units)
        self._inputs = SameInputs(root, says=ranks.everyone.rank == 0)
        slices = units[0].slices
        self._slice_buffers = None if slices is None else SliceBuffers(root, slices, whole)
        if slices is not None and stage_of(root) is None:
            mark_places(root)
        self._num_watched = 0  # number of the reducer's gradients with hooks
        self._watch_gradients()
        _living.add(self)

    @contextmanager
    def _communicating(self) -> Iterator[None]:
        """Count the time of the block as communication."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.comm_s += time.perf_counter() - start

    def _unshard(self, unit: Unit) -> None:
        """Fill the full parameters of a unit and show them. Collective unless they are already full."""
        if unit.state is UnitState.UNSHARDED:
            return
        with self._communicating():
            gathered = unit.unshard()
        if gathered and not unit.lasts:
            self._gathers.note(unit)
            self._prefetch.used(unit)

    def _reshard(self, unit: Unit, *, keep: bool = False, for_backward: bool = False) -> None:
        """Show the shards of a unit, and free its full parameters unless a graph, `keep` or `hold` needs them."""
        if unit in self._held or unit.state in (UnitState.SHARDED, UnitState.UNSHARDING):
            return  # the prefetch itself frees units that it began to gather
        if keep or self._graph is not Graph.NONE:
            unit.hide()
        else:
            unit.reshard(for_backward=for_backward)

    # Forward

    def forward(
        self,
        unit: Unit,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_entry: bool = False,
    ) -> Any:
        """Run a module's own forward, `call`, or another method of it, with the full parameters of its unit in place.

        `is_entry`: by `register_forward_method` the call may be the outermost one, although the module is not.
        """
        if in_backward():
            # Activation checkpointing computes a forward again, and the backward that follows needs the parameters.
            self._begin_backward()  # with reentrant checkpointing this may be the first call of a backward
            if self._reruns.run_again(unit):
                self.reducer.expect_all(unit)
            return self._run(unit, call, args, kwargs)
        is_root, with_grad = self.phase is not Phase.FORWARD, torch.is_grad_enabled()
        if is_root and unit is not self.units[0] and not is_entry:
            if self.phase is Phase.BACKWARD:
                self.reset()  # an exception has ended it
            if unit.state is not UnitState.UNSHARDED:  # `ShardedModule.unshard`
                raise outside(self._module_of(unit))
        is_inner = unit in self._running  # a method calls its own module, or the module calls itself
        try:
            if is_root:
                self.open()
            self._running.add(unit)
            self._ran.add(unit)
            self._reruns.note(unit, is_root=is_root, with_grad=with_grad)
            slice_buffers = self._slice_buffers if is_root and with_grad else None
            if slice_buffers is not None:
                slice_buffers.begin_forward()
            if is_root and with_grad:
                self._inputs.look(args, kwargs)
            if is_root and unit.slices is not None:
                args, kwargs = aligned((args, kwargs))
            with seeded_at_places() if slice_buffers is not None else nullcontext():
                output = self._run(unit, call, args, kwargs, is_root=is_root)
            if slice_buffers is not None:
                slice_buffers.end_forward()
            if not unit.lasts:
                unit.check_output(tensors_in(output))
            if is_root and with_grad and not self._is_reach_checked:
                # Code that reaches into other modules does so in every forward, so one check of a graph is enough.
                check_graph(output, self._passing, self._tree.module)
                self._is_reach_checked = True
        except BaseException as error:
            if is_root:
                try:
                    if isinstance(error, Exception) and self._compares:  # not for Ctrl-C
                        check_error(error, self._passing, self._tree.module)
                finally:
                    self.reset()  # no fence: the other ranks may be anywhere
            raise
        finally:
            if not is_inner:
                self._running.discard(unit)
        if not unit.lasts and not is_inner:
            # The outermost module's backward comes first: its unit stays full for it.
            self._reshard(unit, keep=not unit.reshard_after_forward or (is_root and with_grad), for_backward=with_grad)
        if is_root:
            self.close(before_backward=with_grad)
        return output

    def _module_of(self, unit: Unit) -> nn.Module:
        return next(module for module in self._tree.module.modules() if unit_of(module) is unit)

    def _run(self, unit: Unit, call: Callable[..., Any], args: Any, kwargs: Any, *, is_root: bool = False) -> Any:
        """Unshard a unit, and run its module's own forward with the dtypes of the policy."""
        self._unshard(unit)
        is_recorded = torch.is_grad_enabled() and (is_root or not unit.lasts)
        with Call(self, unit, self._writes or 0) if is_recorded else nullcontext():
            policy = unit.policy
            if policy.param_dtype is not None and policy.cast_forward_inputs:
                args, kwargs = cast((args, kwargs), policy.param_dtype)
            output = call(*args, **kwargs)
            return output if policy.output_dtype is None else cast(output, policy.output_dtype)

    def open(self) -> None:
        """Called before the outermost forward: see [Note: fences] in fences.py. First cleans up after an earlier exception."""
        if self.phase is not Phase.IDLE:
            self.reset()
        self.reducer.give_up()
        self._fence.go_on()
        self._tree.check()
        if self._graph is Graph.USED:
            self._graph = Graph.NONE
        for unit in self.units:
            for flat in unit.flats:
                flat.check_shown()  # before `reshard` overwrites a parameter that the user has put in place of one of these
            was_full = unit.state is not UnitState.SHARDED
            unit.reshard()  # the full parameters hold the values of an earlier forward
            unit.expire()
            if self._graph is Graph.LIVE and was_full and not unit.lasts:
                unit.unshard()
                unit.hide()
        self._notice_writes()
        self.phase = Phase.FORWARD
        with self._communicating():
            for unit in self._lasting:
                unit.begin_unshard()
            if not (torch.is_grad_enabled() and self.reducer.frozen and self._agree()):
                self._fence.wait()
        ran, self._ran = self._ran, set()
        for unit in self._lasting:
            if unit not in ran or not unit.is_under_way:  # other modules may use its parameters; or no wait is left
                self._unshard(unit)
        with self._communicating():
            self._prefetch.begin("forward")

    def _notice_writes(self) -> None:
        """After writes to the shards, let autograd refuse the backward of each earlier forward, whose values are gone."""
        writes = count_writes(self._shards)
        if writes != self._writes:
            if self._writes is not None:
                outdate([param.full for unit in self.units for param in unit.params])
                forget_calls(self, writes)
            self._writes = writes

    def _agree(self) -> bool:
        """Let the reducer find thawed parameters. Returns whether its message replaces the fence, because the same ranks took part."""
        together = self._trained_together(self.ranks)
        if self.reducer.agree(together):
            self._watch_gradients()
        return self._fence.num_ranks == together.size

    def _trained_together(self, ranks: DataParallelRanks) -> Communicator:
        """The ranks that average their gradients."""
        return ranks.data_parallel if self.units[0].sync_copies else ranks.within

    def close(self, *, before_backward: bool = False, is_compared: bool = False) -> None:
        """Called after the outermost forward, and after a backward. `before_backward`: a backward may follow. `is_compared`: the ranks
        have compared the order of their gathers."""
        with self._communicating():
            self._prefetch.end()
        for unit in self._lasting:
            if unit.state is UnitState.UNSHARDING:
                self._unshard(unit)
            if unit not in self._held:
                unit.reshard()
        self.phase = Phase.FORWARD if self._held else Phase.IDLE  # a backward may have run while parameters are held
        if before_backward:
            self._fence.put_off()
            return
        with self._communicating():
            if self._compares and not is_compared:
                # Compare within the shard group only: another copy of the model may run other modules.
                order = torch.tensor(self._gathers.both_ways(), dtype=torch.uint8)
                self.ranks.shard.all_reduce(order, "max")
                self._check_gathers(order)
            self._fence.wait()

    # Backward

    def _watch_gradients(self) -> None:
        # A hook refers to the step weakly, and to the gradients by a number. Python's garbage collector does not see torch's hooks: a
        # strong reference would keep the model alive for ever.
        this = weakref.ref(self)
        for number, (unit, gradients) in enumerate(self.reducer.gradients[self._num_watched :], self._num_watched):
            for index, param in enumerate(gradients.params):
                param.full.register_post_accumulate_grad_hook(partial(_on_gradient, this, number, index))
                self.places[id(param.full)] = Place(unit, gradients, index)
        self._num_watched = len(self.reducer.gradients)

    @property
    def looks_inside(self) -> bool:
        """Whether it must be known what a backward does within calls: see [Note: route] in route.py."""
        return bool(self._passing) or self.reducer.has_missed

    def follow(self, route: Route) -> None:
        """Called before a backward that takes this route. RuntimeError if the shards were written since the forward."""
        writes = count_writes(self._shards)
        if self.phase is not Phase.BACKWARD and any(call.writes != writes for call in route.calls):
            self._fence.forget()
            raise RuntimeError(
                "parameters were written between a forward and its backward (by an optimizer, an EMA, a load), so the gradients would "
                "fit neither the old nor the new values; run the backward first, or the forward again"
            )
        route.watch(self._enter, self._complete)
        self._routes.append(route)
        if self.phase is Phase.BACKWARD and route.expected is not None:
            self.reducer.expect(route.expected)

    def leave(self, route: Route) -> None:
        """Called after that backward, or after its exception."""
        route.end()
        if route in self._routes:
            self._routes.remove(route)

    def _enter(self, call: Call) -> None:
        """Called before a backward comes into a call of a module."""
        self._begin_backward()
        if torch.is_grad_enabled():
            self._graph = Graph.LIVE
            self._makes_graph = True
        while call is not None and (unit := call.unit) is not None:
            if call.model is self:
                self._unshard(unit)
            call = call.around

    def _begin_backward(self) -> None:
        """Begin a backward, unless it has begun."""
        if self.phase is Phase.BACKWARD:
            return
        self._open_backward()
        at_end_of_backward(self._end_backward)

    def _open_backward(self) -> None:
        self._begin_reductions()
        for unit in self._lasting:
            self._unshard(unit)
        with self._communicating():
            self._prefetch.begin("backward")

    def _begin_reductions(self) -> None:
        self._fence.go_on()
        self.phase = Phase.BACKWARD
        self._makes_graph = False
        known = [route.expected for route in self._routes if route.expected is not None]
        self.reducer.begin(known[0] if known and len(known) == len(self._routes) else None)
        for more in known[1:]:
            self.reducer.expect(more)

    def on_gradient(self, number: int, index: int) -> None:
        """Called when autograd has accumulated the gradient of parameter `index` of the reducer's `gradients[number]`."""
        self._begin_backward()
        if self.reducer.reducing is not None:
            with self._communicating():
                self.reducer.reducing.progress()
        unit = self.reducer.take(number, index)
        if unit is not None:
            self._reruns.got_gradient(unit, is_within=len(self._routes) > 1)
            self._complete(unit)

    def _complete(self, unit: Unit) -> None:
        """Called when a gradient of a unit has come, and when all its exits are passed: it may be complete, see [Note: complete]."""
        if not self.reducer.has_all(unit) or self._reruns.may_come(unit):
            return
        if not unit.lasts:
            # Another backward will go through a graph that was made. Without a route it is not known whether calls are left.
            if self._graph is not Graph.NONE or not any(route.ends(unit) for route in self._routes):
                return
            if any(route.exits.get(unit) for route in self._routes):
                return
            self._reshard(unit)
        with self._communicating():
            self.reducer.complete(unit)

    def _end_backward(self) -> None:
        """Called when the autograd engine has computed all gradients of a backward."""
        self._reruns.end_backward()
        if self._graph is Graph.LIVE and not self._makes_graph:
            self._graph = Graph.USED
        for unit in self._passing:
            self._reshard(unit)
        self._end_reductions()

    def _end_reductions(self) -> None:
        is_round = not self.reducer.is_pending
        self.num_backwards += is_round
        with self._communicating():
            self.reducer.end(makes_graph=self._makes_graph)
            self._forget_unused()
            self.reducer.compress()
            if self._slice_buffers is not None and is_round:
                self._slice_buffers.end_round()
        self.close(is_compared=is_round and not self.ranks.has_replicas)
        for gradients in self.reducer.done:
            for param in gradients.params:
                if param.shard.grad is not None and not gradients.is_within_step:
                    run_accumulation_hooks(param.shard)  # not earlier, because these hooks may write to shards
        self._inputs.warn()

    def _forget_unused(self) -> None:
        """Set the gradient of parameters that no rank used to None, like plain torch, so that an optimizer skips them.

        The same message compares the order of gathers between the ranks, unless the model has several copies, and the ranks' inputs
        until that is done: see same_inputs.py.
        """
        params: dict[Communicator, list[tuple[Gradients, int]]] = {}
        for gradients in self.reducer.done:
            params.setdefault(self._trained_together(gradients.ranks), []).extend(
                (gradients, index) for index in range(len(gradients.params))
            )
        for comm, its in params.items():
            order = [] if self.ranks.has_replicas or comm is not self.ranks.data_parallel else self._gathers.both_ways()
            is_compared = comm is self._trained_together(self.ranks) and comm.size > 1 and not self._inputs.is_over
            inputs = self._inputs.both_ways() if is_compared else []
            used = [gradients.was_used[index] for gradients, index in its]
            message = comm.all_reduce(torch.tensor([*order, *inputs, *used], dtype=torch.uint8), "max")
            most_order, most_inputs, most_used = message.tensor_split((len(order), len(order) + len(inputs)))
            if order:
                self._check_gathers(most_order)
            if inputs:
                self._inputs.check(most_inputs.tolist(), comm.size)
            for (gradients, index), anywhere in zip(its, most_used.tolist(), strict=True):
                gradients.was_used[index] = bool(anywhere)
                if not anywhere and gradients.was_fresh[index]:
                    gradients.params[index].shard.grad = None

    def _check_gathers(self, most: torch.Tensor) -> None:
        try:
            self._gathers.check(most)
        except RuntimeError:
            self.reset()
            self._prefetch.forget()
            raise

    # Between steps

    def reduce_gradients(self) -> None:
        """Reduce the gradients that wait, as a backward does that computes no more of them. Collective."""
        if self.reducer.waits:
            self._begin_reductions()
            self._end_reductions()

    @contextmanager
    def one_backward(self) -> Iterator[None]:
        """See `ShardedModule.one_backward`."""
        before = self.num_backwards
        yield
        if self.num_backwards == before:
            self._open_backward()
            self._end_backward()

    def set_stage(self, stage: int, *, is_round: bool) -> None:
        """The next forward or backward is one of this stage of a pipeline. `is_round`: see `ShardedModule.set_stage`."""
        self.reducer.stages = (stage,) if is_round else ()
        if self._slice_buffers is not None:
            self._slice_buffers.stage = stage

    def end_step_of_stages(self) -> None:
        """Merge the buffers after the last round of all stages. Collective."""
        if self._slice_buffers is not None:
            with self._communicating():
                self._slice_buffers.end_step()

    def drop(self) -> None:
        """Drop gradients that wait, and the rounds of a step with slices that has not ended."""
        self.reducer.drop()
        if self._slice_buffers is not None:
            self._slice_buffers.forget()

    def settle(self) -> None:
        """Called before shards are returned to the user or written: see [Note: fence put off] in fences.py. Not collective."""
        self._fence.settle()

    def tidy(self) -> None:
        """Called before the model's parameters are returned to the user: after an exception in a backward the full ones are shown."""
        if self.phase is Phase.BACKWARD and not in_backward():
            self.reset()
        self.settle()

    def hold(self, unit: Unit) -> None:
        """Keep the full parameters of a unit filled and shown until `let_go`. Collective."""
        self._unshard(unit)
        self._held.add(unit)

    def let_go(self, unit: Unit) -> None:
        """End `hold`."""
        self._held.discard(unit)
        if not unit.lasts:
            self._reshard(unit)

    def end_graph(self) -> None:
        """Free full parameters that stayed for a graph: see [Note: second derivatives]."""
        if self._graph is not Graph.NONE and self.phase is Phase.IDLE:
            self._graph = Graph.NONE
            for unit in self._passing:
                unit.reshard()

    def before_writes(self, params: Iterable[torch.Tensor], doing: str) -> None:
        """Called before `doing`, such as an optimizer's step, writes shards. RuntimeError if gradients of `params` are not reduced."""
        self.settle()
        self.reducer.check_reduced(params, doing)
        if self._graph is not Graph.NONE:
            own = {id(shard) for shard in self._shards}
            if any(id(param) in own for param in params):
                self.end_graph()

    def reset(self) -> None:
        """Back to idle after an exception in the middle of a step. No communication: the ranks may be anywhere."""
        self._graph = Graph.NONE
        self.reducer.forget_rounds()
        if self._slice_buffers is not None:
            self._slice_buffers.reset()
        for unit in self.units:
            unit.reset()
        self._reruns.forget()
        self._prefetch.reset()
        self._gathers.forget()
        self.phase = Phase.IDLE
        self._fence.forget()


def _on_gradient(step: "weakref.ref[TrainingStep]", number: int, index: int, full: torch.Tensor) -> None:
    alive = step()
    if (
        alive is not None and full.grad is not None
    ):  # torch calls the hook, too, if a backward returns None for a parameter
        alive.on_gradient(number, index)


# An optimizer or an EMA has only parameters. In this set it finds the steps to which these parameters may belong.
_living: "weakref.WeakSet[TrainingStep]" = weakref.WeakSet()


def living_steps() -> list[TrainingStep]:
    """The steps of all models of this process that have run."""
    return list(_living)


@contextmanager
def routes_of(outputs: Sequence[Any], inputs: Sequence[Any]) -> Iterator[None]:
    """Around a backward from `outputs` to `inputs` (empty: to all leaves): let the steps of the models on its way follow it."""
    steps = living_steps()
    inside = len(steps) > 1 or any(step.looks_inside for step in steps)
    routes = find_routes(outputs, inputs, inside=inside) if steps else {}
    try:
        for step, route in routes.items():
            step.follow(route)
        yield
    finally:
        for step, route in routes.items():
            step.leave(route)
