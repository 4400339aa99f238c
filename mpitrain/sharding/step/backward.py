"""The backwards of one sharded model: which units they unshard and reshard, and when gradients are reduced. step.py has the order."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from collectives import Communicator
from mpitrain.placement.marks import box_of
from mpitrain.sharding.ranks import DataParallelRanks
from mpitrain.sharding.step.calls import GradientPlace, UnitCall
from mpitrain.sharding.step.route import Route, find_routes
from mpitrain.sharding.step.state import Graph, Phase, StepState
from mpitrain.sharding.unit.gradients import Gradients
from mpitrain.sharding.unit.parameter import ShardedParameter
from mpitrain.sharding.unit.unit import Unit, all_sharded
from mpitrain.torch_glue.torch_internals import (
    at_end_of_backward,
    count_writes,
    in_backward,
    run_accumulation_hooks,
    set_compiler,
)


class Backwards(StepState):
    """A step that follows backwards."""

    def __init__(self, root: nn.Module, units: list[Unit], ranks: DataParallelRanks) -> None:
        super().__init__(root, units, ranks)
        self._num_watched = 0  # number of the reducer's gradients with hooks
        self._watch_gradients()
        _living.add(self)

    def _watch_gradients(self) -> None:
        # A hook refers to the step weakly, and to the gradients by a number. Python's garbage collector does not see torch's hooks: a
        # strong reference would keep the model alive for ever.
        this = weakref.ref(self)
        for number, (unit, gradients) in enumerate(self.reducer.gradients[self._num_watched :], self._num_watched):
            for index, param in enumerate(gradients.params):
                param.full.register_post_accumulate_grad_hook(partial(_on_gradient, this, number, index))
                self.places[id(param.full)] = GradientPlace(unit, gradients, index)
        self._num_watched = len(self.reducer.gradients)

    @property
    def looks_inside(self) -> bool:
        """Whether it must be known what a backward does within calls: see [Note: route] in route.py."""
        return bool(self._passing) or self.reducer.has_missed

    def begin_route(self, route: Route) -> None:
        """Called before a backward that takes this route. RuntimeError if shards that it uses were written since the forward."""
        if self.phase is not Phase.BACKWARD:
            self._notice_writes()
            if any(map(self._is_outdated, route.calls)):
                self._fence.abandon()
                raise RuntimeError(
                    "parameters were written between a forward and its backward (by an optimizer, an EMA, a load), so the gradients "
                    "would fit neither the old nor the new values; run the backward first, or the forward again"
                )
        route.begin(self._enter, self._complete)
        self._routes.append(route)
        if self.phase is Phase.BACKWARD and route.expected is not None:
            self.reducer.expect(route.expected)

    def end_route(self, route: Route) -> None:
        """Called after that backward, or after its exception."""
        route.end()
        if route in self._routes:
            self._routes.remove(route)

    def _enter(self, call: UnitCall) -> None:
        """Called before a backward comes into a call of a module."""
        self._ensure_backward()
        if torch.is_grad_enabled():
            self._graph = Graph.LIVE
            self._makes_graph = True
        entered: UnitCall | None = call
        while entered is not None and (unit := entered.unit) is not None:
            if entered.model is self:
                self._unshard(unit)
            entered = entered.around

    def _ensure_backward(self) -> None:
        """Begin a backward, unless it has begun."""
        if self.phase is Phase.BACKWARD:
            return
        self._begin_backward()
        at_end_of_backward(self._end_backward)

    def _begin_backward(self) -> None:
        self._begin_reductions()
        for unit in self._lasting:
            self._unshard(unit)
        with self._communicating():
            self._prefetch.begin("backward")

    def _begin_reductions(self) -> None:
        self._fence.skip()
        self.phase = Phase.BACKWARD
        self._makes_graph = False
        known = [route.expected for route in self._routes if route.expected is not None]
        self.reducer.begin(known[0] if known and len(known) == len(self._routes) else None)
        for more in known[1:]:
            self.reducer.expect(more)

    def on_gradient(self, number: int, index: int) -> None:
        """Called when autograd has accumulated the gradient of parameter `index` of the reducer's `gradients[number]`."""
        self._ensure_backward()
        self._check_unwritten(self.reducer.gradients[number][1].params[index])
        if self.reducer.reducing is not None:
            with self._communicating():
                self.reducer.reducing.progress()
        unit = self.reducer.take(number, index)
        if unit is not None:
            self._reruns.got_gradient(unit, is_within=self.num_around > 0)
            self._complete(unit)

    def _check_unwritten(self, param: ShardedParameter) -> None:
        """RuntimeError if a hook within the backward has written to a parameter whose gradient comes only now."""
        if self._writes_of.get(param) not in (None, count_writes([param.shard])):
            self._fence.abandon()
            raise RuntimeError(
                f"parameter {param.name} was written within a backward before its gradient was complete (by a hook on an activation), "
                "so the gradients would fit neither the old nor the new values; write after the backward, or in a hook of "
                "register_post_accumulate_grad_hook"
            )

    def _complete(self, unit: Unit) -> None:
        """Called when a gradient of a unit has come, and when all its exits are passed: it may be complete, see [Note: complete]."""
        is_known = (
            bool(self._routes) and all(route.expected is not None for route in self._routes) and not self.num_around
        )
        if not self.reducer.has_all(unit) or self._reruns.may_come(unit, is_known=is_known):
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
            self._reset_unused()
            self.reducer.compress()
            if self._slice_buffers is not None and is_round:
                self._slice_buffers.end_round()
        self.end_pass(is_compared=is_round and self._compares_at_end)
        for gradients in self.reducer.done:
            for param, was_used in zip(gradients.params, gradients.was_used, strict=True):
                if was_used and param.shard.grad is not None and not gradients.is_within_step:
                    run_accumulation_hooks(param.shard)  # not earlier, because these hooks may write to shards
        if self._inputs is not None and self._inputs.is_over:
            inputs, self._inputs = self._inputs, None
            inputs.warn()

    def _reset_unused(self) -> None:
        """Set the gradient of parameters that no rank used to None, like plain torch, so that an optimizer skips them.

        The same message compares the order of gathers between the ranks, unless the model has several copies, and the ranks' inputs
        until that is done: see checks/same_inputs.py.
        """
        params: dict[Communicator, list[tuple[Gradients, int]]] = {}
        for gradients in self.reducer.done:
            params.setdefault(self._trained_together(gradients.ranks), []).extend(
                (gradients, index) for index in range(len(gradients.params))
            )
        for comm, its in params.items():
            order = self._gathers.both_ways() if self._compares_at_end and comm is self.ranks.data_parallel else []
            compared = self._inputs if comm is self._trained_together(self.ranks) and comm.size > 1 else None
            inputs = [] if compared is None else compared.both_ways()
            used = [gradients.was_used[index] for gradients, index in its]
            message = comm.all_reduce(torch.tensor([*order, *inputs, *used], dtype=torch.uint8), "max")
            most_order, most_inputs, most_used = message.tensor_split((len(order), len(order) + len(inputs)))
            if order:
                self._check_gathers(most_order)
            if compared is not None:
                compared.check(most_inputs.tolist(), comm.size)
            for (gradients, index), anywhere in zip(its, most_used.tolist(), strict=True):
                gradients.was_used[index] = bool(anywhere)
                if not anywhere and gradients.was_fresh[index]:
                    gradients.params[index].shard.grad = None

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
            self._begin_backward()
            self._end_backward()


def _on_gradient(step: "weakref.ref[Backwards]", number: int, index: int, full: torch.Tensor) -> None:
    alive = step()
    if (
        alive is not None and full.grad is not None
    ):  # torch calls the hook, too, if a backward returns None for a parameter
        alive.on_gradient(number, index)


# An optimizer or an EMA has only parameters. In this set it finds the steps to which these parameters may belong.
_living: "weakref.WeakSet[Backwards]" = weakref.WeakSet()


def living_steps() -> list[Backwards]:
    """The steps of all models of this process that have run."""
    return list(_living)


def check_reduced(params: Iterable[torch.Tensor], doing: str) -> None:
    """RuntimeError if gradients of these shards, of any model, still wait for their reduction, so that `doing` would miss them."""
    params = list(params)
    for step in _living:
        step.reducer.check_reduced(params, doing)


def run_backward(original: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
    """torch's backward, `original`, which the steps of the models on its way follow.

    RuntimeError if a shard is among the inputs that the program asks for.
    """
    inputs = args[3] if len(args) > 3 else ()
    asked = {id(tensor) for tensor in inputs if box_of(tensor) is not None}
    param = next((param for param in all_sharded() if id(param.shard) in asked), None) if asked else None
    if param is not None:
        raise RuntimeError(
            f"torch.autograd.grad, or backward(inputs=...): {param.name} is sharded, and its shard is not part of the graph; call "
            "loss.backward(), after which param.grad has this rank's rows, averaged over the ranks"
        )
    compiler = set_compiler(None)  # of a compiled step of training: it would trace the hooks
    try:
        with _followed(outputs, inputs):
            return original(outputs, *args, **kwargs)
    finally:
        if compiler is not None:
            set_compiler(compiler)


@contextmanager
def _followed(outputs: Sequence[Any], inputs: Sequence[Any]) -> Iterator[None]:
    """Around a backward from `outputs` to `inputs` (empty: to all leaves): let the steps of the models on its way follow it."""
    steps = living_steps()
    is_within = in_backward()
    inside = len(steps) > 1 or any(step.looks_inside for step in steps)
    routes: dict[Any, Route] = dict(find_routes(outputs, inputs, inside=inside)) if steps else {}
    for step in steps:
        step.num_around += is_within
    try:
        for step, route in routes.items():
            step.begin_route(route)
        yield
    finally:
        for step, route in routes.items():
            step.end_route(route)
        for step in steps:
            step.num_around -= is_within
