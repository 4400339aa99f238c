"""The backwards of one sharded model: which units they unshard and reshard, and when gradients are reduced. step.py has the order."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from collectives import Communicator
from mpitrain.sharding.step.calls import Call, Place
from mpitrain.sharding.step.route import Route
from mpitrain.sharding.step.state import Graph, Phase, StepState
from mpitrain.sharding.unit.gradients import Gradients
from mpitrain.sharding.unit.parameter import ShardedParameter
from mpitrain.sharding.unit.unit import Unit
from mpitrain.torch_glue.torch_internals import (
    at_end_of_backward,
    count_writes,
    run_accumulation_hooks,
)


class Backwards(StepState):
    """A step that follows backwards."""

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
        """Called before a backward that takes this route. RuntimeError if shards that it uses were written since the forward."""
        if self.phase is not Phase.BACKWARD:
            self._notice_writes()
            if any(map(self._is_outdated, route.calls)):
                self._fence.forget()
                raise RuntimeError(
                    "parameters were written between a forward and its backward (by an optimizer, an EMA, a load), so the gradients "
                    "would fit neither the old nor the new values; run the backward first, or the forward again"
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
        entered: Call | None = call
        while entered is not None and (unit := entered.unit) is not None:
            if entered.model is self:
                self._unshard(unit)
            entered = entered.around

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
            self._fence.forget()
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
            self._forget_unused()
            self.reducer.compress()
            if self._slice_buffers is not None and is_round:
                self._slice_buffers.end_round()
        self.close(is_compared=is_round and not self.ranks.has_replicas)
        for gradients in self.reducer.done:
            for param, was_used in zip(gradients.params, gradients.was_used, strict=True):
                if was_used and param.shard.grad is not None and not gradients.is_within_step:
                    run_accumulation_hooks(param.shard)  # not earlier, because these hooks may write to shards
        self._inputs.warn()

    def _forget_unused(self) -> None:
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


def _on_gradient(step: "weakref.ref[Backwards]", number: int, index: int, full: torch.Tensor) -> None:
    alive = step()
    if (
        alive is not None and full.grad is not None
    ):  # torch calls the hook, too, if a backward returns None for a parameter
        alive.on_gradient(number, index)
