"""The route of a backward through sharded models, found in autograd's graph before the backward begins.

[Note: route] torch's `backward` and `grad` first call `find_routes`. It follows the graph from the outputs, about 3 us per node, and
finds for each call of a unit's module ([Note: nodes of a call] in calls.py):
- its entries: nodes at which the backward comes into the call. Before the first one runs, the unit is unsharded. However an activation
  left its block (as the output, changed in place, in an object, kept by a hook), its gradient comes in through one of these nodes.
- its exits: nodes from which the backward goes to others than the unit's own parameters. When all have run and the parameters have
  their gradients, the unit is not needed any more in this backward.
It also finds the parameters that get a gradient. autograd accumulates the gradient of a parameter once in a backward, however often its
module ran. So when these have come, the unit's gradients are complete.

With one model whose full parameters last and are all used, the route ends at the entries, because the rest is known.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from mpitrain.sharding.step.calls import Model, UnitCall, finder
from mpitrain.sharding.unit.gradients import Gradients
from mpitrain.sharding.unit.unit import Unit
from mpitrain.torch_glue.torch_internals import leaf_of

Expected = dict[Unit, set[tuple[Gradients, int]]]
"""The gradients that will come, each by its place; an unused unit is left out."""


class Route:
    """A backward through one model. `expected`: None if it is not known."""

    def __init__(self) -> None:
        self.calls: set[UnitCall] = set()  # those through which the backward goes
        self.entries: dict[Any, UnitCall] = {}
        self.exits: dict[Unit, set[Any]] = {}
        self.expected: Expected | None = None
        self._hooks: list[Any] = []

    def begin(self, enter: Callable[[UnitCall], None], leave: Callable[[Unit], None]) -> None:
        """Let the backward call `enter(call)` before it comes into a call, and `leave(unit)` when it has passed all exits of a unit."""

        def entering(call: UnitCall) -> Callable[[Any], None]:
            return lambda grads: enter(call)

        def leaving(unit: Unit, node: Any) -> Callable[[Any, Any], None]:
            def left(inputs: Any, outputs: Any) -> None:
                self.exits[unit].discard(node)
                if not self.exits[unit]:
                    leave(unit)

            return left

        self._hooks = [node.register_prehook(entering(call)) for node, call in self.entries.items()]
        for unit, nodes in self.exits.items():
            self._hooks += [node.register_hook(leaving(unit, node)) for node in nodes]

    def ends(self, unit: Unit) -> bool:
        """Whether the backward goes through calls of a unit, so that it is known when the last one has ended."""
        return any(call.unit is unit for call in self.calls)

    def end(self) -> None:
        """Take the hooks back. Another backward may go through these nodes."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.exits.clear()


def find_routes(outputs: Iterable[Any], inputs: Sequence[Any], *, inside: bool) -> dict[Model, Route]:
    """The routes of a backward from `outputs` (tensors or edges), by model: see [Note: route].

    `inputs`: tensors or edges to which alone the backward goes; empty: to all leaves. `inside`: whether the graph is followed within
    calls; otherwise the routes have entries alone.
    """
    walk = _Walk(inside)
    roots = [node for output in outputs if (node := _node_of(output)) is not None]
    walk.follow(roots, _leading_to(inputs, roots) if inputs else None)
    if inside and not walk.hides:
        for model, route in walk.routes.items():
            route.expected = {unit: set() for unit in model.units}
            for place in filter(None, (model.places.get(id(leaf)) for leaf in walk.leaves)):
                route.expected[place.unit].add((place.gradients, place.at))
    return walk.routes


class _Walk:
    def __init__(self, inside: bool) -> None:
        self._inside = inside
        self._find = finder()
        self._calls: dict[Any, UnitCall | None] = {}  # of each node that was seen
        self.routes: dict[Model, Route] = {}
        self.leaves: list[torch.Tensor] = []
        self.hides = False
        """Whether a node may run a backward within the backward, as torch's reentrant checkpoint does."""

    def follow(self, roots: list[Any], allowed: set[Any] | None) -> None:
        calls = self._calls
        left: list[Any] = []
        for root in roots:
            if root not in calls:
                self._see(root, None, left)
                self._cross(None, root)
        while left:
            node = left.pop()
            call = calls[node]
            for target, _ in node.next_functions:
                if target is None or (allowed is not None and target not in allowed):
                    continue
                if target not in calls:
                    self._see(target, call, left)
                if calls[target] is not call:
                    self._cross(node, target)

    def _see(self, node: Any, before: UnitCall | None, left: list[Any]) -> None:
        call = self._find(node, before)
        self._calls[node] = call
        if call is None or self._inside:
            left.append(node)
        if call is None and (leaf := leaf_of(node)) is not None:
            self.leaves.append(leaf)
        self.hides = self.hides or "Checkpoint" in type(node).__name__

    def _cross(self, node: Any | None, target: Any) -> None:
        """The backward goes from a node to one of another call."""
        call, into = None if node is None else self._calls[node], self._calls[target]
        if into is not None and (model := into.model) is not None:
            route = self.routes.setdefault(model, Route())
            route.calls.add(into)
            # A backward that comes out of a call within this one was in this one before.
            if call is None or call.model is not model or not call.is_within(into):
                route.entries[target] = into
        if call is None or (unit := call.unit) is None or (model := call.model) is None or unit.lasts:
            return
        place = model.places.get(id(leaf_of(target))) if into is None else None
        if place is None or place.unit is not unit:
            self.routes[model].exits.setdefault(unit, set()).add(node)


def _node_of(value: Any) -> Any:
    """The node of a tensor or an edge; None for a leaf, and for a tensor without gradients."""
    return value.node if isinstance(value, GradientEdge) else value.grad_fn


def _leading_to(inputs: Sequence[Any], roots: list[Any]) -> set[Any] | None:
    """The nodes from which the graph leads to one of these tensors or edges; None if it leads to none of them."""
    found = {node for each in inputs if (node := _node_of(each)) is not None}
    leaves, seen = {id(each) for each in inputs}, set[Any]()
    left = [(root, False) for root in roots]
    while left:
        node, is_back = left.pop()
        following = [target for target, _ in node.next_functions if target is not None]
        if is_back:
            if not found.isdisjoint(following):
                found.add(node)
        elif node not in seen:
            seen.add(node)
            if (leaf := leaf_of(node)) is not None and id(leaf) in leaves:
                found.add(node)
            left.append((node, True))
            left += [(target, False) for target in following]
    return None if found.isdisjoint(seen) else found
