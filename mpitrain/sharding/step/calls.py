"""The calls of a sharded module: the nodes of autograd's graph that a call has made, the calls that a backward runs again, and the
tensors in the arguments and in the output.

[Note: nodes of a call] autograd numbers the nodes that a thread makes, in their order. So the nodes of a call are those whose numbers
lie between two readings of the counter, at the call's begin and at its end. The call itself, its arguments, its output and what it
keeps elsewhere stay as they are: no object is wrapped, and no tensor gets a hook. Nodes of a call within another one are that one's.

[Note: reruns] A backward may run a module's forward again, for a backward within the backward, as torch's reentrant checkpoint does.
Such a backward accumulates the gradients of a parameter by itself, and another one, of another call, may follow. Nothing in the graph
tells how many. But the calls are known: in the forward they ran without gradients, within a forward that records a graph.
"""

import threading
import weakref
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_map

from mpitrain.sharding.unit.gradients import Gradients
from mpitrain.sharding.unit.unit import Unit
from mpitrain.torch_glue.torch_internals import node_number, nodes_made

T = TypeVar("T")


class GradientPlace(NamedTuple):
    """Where the gradient of a full parameter belongs: parameter `at` of `gradients`."""

    unit: Unit
    gradients: Gradients
    at: int


class Model(Protocol):
    """A model whose modules are called. `places`: of its full parameters, by their `id`."""

    units: list[Unit]
    places: dict[int, GradientPlace]


_MOST = 100_000
"""How many calls of a thread are remembered at most. A program that never writes to its parameters may make them for ever."""


_FEW = 256
"""So many more calls than those kept may wait to be freed."""


class UnitCall:
    """A call, which runs in a `with` statement, and the nodes that it has made.

    `writes`: the count of writes to the shards. `entry`: the part of the unit's module that was called, if not the whole.
    """

    __slots__ = ("_entry", "_model", "_unit", "around", "end", "first", "has_inner", "writes")

    def __init__(self, model: Model, unit: Unit, writes: int, entry: nn.Module | None) -> None:
        self._model, self._unit, self.writes = weakref.ref(model), weakref.ref(unit), writes
        self._entry = None if entry is None else weakref.ref(entry)
        self.first, self.end = 0, 0
        self.around: UnitCall | None = None
        self.has_inner = False

    @property
    def model(self) -> Model | None:
        """The model; None if it is gone."""
        return self._model()

    @property
    def unit(self) -> Unit | None:
        """The unit of the module; None if it is gone."""
        return self._unit()

    @property
    def entry(self) -> nn.Module | None:
        """The part of the unit's module that was called; None for the whole, and if it is gone."""
        return None if self._entry is None else self._entry()

    def __enter__(self) -> None:
        mine = _mine()
        self.around, mine.current = mine.current, self
        if self.around is not None:
            self.around.has_inner = True
        self.first = self.end = nodes_made()
        mine.add(self)

    def __exit__(self, *_: Any) -> None:
        _mine().current = self.around
        self.end = nodes_made()

    def is_within(self, other: "UnitCall") -> bool:
        """Whether this call is a part of another one."""
        around = self.around
        while around is not None and around is not other:
            around = around.around
        return around is other


class _Calls:
    """The calls of one thread, in the order of their begins."""

    def __init__(self) -> None:
        self.calls: list[UnitCall] = []
        self.firsts: list[int] = []
        self.num_kept = 0  # calls that were left when some were freed
        self.current: UnitCall | None = None  # the innermost call under way

    def add(self, call: UnitCall) -> None:
        if not self.calls:
            _with_calls.append(self)
        if len(self.calls) >= _MOST:
            self.keep(self.calls[_MOST // 2 :])
        self.calls.append(call)
        self.firsts.append(call.first)

    def keep(self, calls: list[UnitCall]) -> None:
        self.calls, self.firsts, self.num_kept = calls, [call.first for call in calls], len(calls)

    def find(self, number: int) -> UnitCall | None:
        at = bisect_right(self.firsts, number)
        call = self.calls[at - 1] if at else None
        while call is not None and number >= call.end:
            call = call.around
        return call


_local = threading.local()
_with_calls: list[_Calls] = []  # of all threads


def _mine() -> _Calls:
    mine: _Calls | None = getattr(_local, "calls", None)
    if mine is None:
        mine = _local.calls = _Calls()
    return mine


def finder() -> Callable[[Any, UnitCall | None], UnitCall | None]:
    """A function that returns the innermost call which has made a node, or None. Calls under way are not found. Its second argument
    is a guess.

    Two threads may give the same number: then a call of this thread is taken. Usually a program computes in one thread.
    """
    mine = _mine()
    of_threads = [mine, *(calls for calls in reversed(_with_calls) if calls is not mine)]

    def find(node: Any, guess: UnitCall | None) -> UnitCall | None:
        number = node_number(node)
        if guess is not None and guess.first <= number < guess.end and not guess.has_inner:
            return guess
        for calls in of_threads:
            if (call := calls.find(number)) is not None and call.model is not None:
                return call
        return None

    return find


def free_calls(model: Model, is_past: Callable[[UnitCall], bool]) -> None:
    """Free the calls of a model of which `is_past` is true, and those of models that are gone, if there are many new calls."""
    for calls in _with_calls:
        # So each call is looked at a few times at most, however many others a frozen model has.
        if len(calls.calls) < 2 * calls.num_kept + _FEW:
            continue
        calls.keep(
            [each for each in calls.calls if (of := each.model) is not None and (of is not model or not is_past(each))]
        )
    _with_calls[:] = [calls for calls in _with_calls if calls.calls]


class Reruns:
    """The calls of units that may run again: see [Note: reruns]."""

    def __init__(self) -> None:
        self._ahead: Counter[Unit] = Counter()  # calls without gradients that have not run again
        self._again: set[Unit] = set()  # units whose modules have run again in this backward
        # Units with gradients of a backward within the backward that is of no such call.
        self._uncertain: set[Unit] = set()
        self._records = False  # whether the outermost forward records a graph

    def note(self, unit: Unit, *, is_outermost: bool, with_grad: bool) -> None:
        """Record a call in a forward."""
        if is_outermost:
            self._records = with_grad
        elif self._records and not with_grad:
            self._ahead[unit] += 1

    def run_again(self, unit: Unit) -> bool:
        """Record a call in a backward. Returns whether it is one that ran without gradients, so that a backward of it follows."""
        is_one = self._ahead[unit] > 0
        if is_one:
            self._ahead[unit] -= 1
            self._again.add(unit)
        return is_one

    def got_gradient(self, unit: Unit, *, is_within: bool) -> None:
        """Record a gradient of a unit. `is_within`: of a backward within the backward."""
        if is_within and unit not in self._again:
            self._uncertain.add(unit)

    def may_come(self, unit: Unit, *, is_known: bool) -> bool:
        """Whether a later backward within this one may compute gradients of a unit.

        `is_known`: no backward within this one is under way or to be seen in the graph, so calls without gradients are just that,
        such as those of a target.
        """
        return unit in self._uncertain or (not is_known and self._ahead[unit] > 0)

    def end_backward(self) -> None:
        """End the backward. Calls that it did not run again were not checkpointed, if no call of the unit was."""
        for unit in set(self._ahead) - self._again:
            del self._ahead[unit]
        self._again.clear()
        self._uncertain.clear()

    def reset(self) -> None:
        """Begin again without calls, because their backward will not come, as after a write to the parameters."""
        self._ahead.clear()
        self._again.clear()
        self._uncertain.clear()


# Arguments and outputs

_DEEPEST = 3  # objects within objects


def tensors_in(output: Any) -> list[torch.Tensor]:
    """All tensors in the output of a module, also in dataclasses and other objects. 1 us for a tensor or a few of them in a tuple."""
    found: list[torch.Tensor] = []
    left, seen = [(output, 0)], set[int]()
    while left:
        value, depth = left.pop()
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif type(value) in _PLAIN or id(value) in seen or isinstance(value, nn.Module | type):
            continue
        elif isinstance(value, Mapping | list | tuple | set | frozenset | deque):
            seen.add(id(value))
            left += [(each, depth) for each in (value.values() if isinstance(value, Mapping) else value)]
        elif depth < _DEEPEST:
            seen.add(id(value))
            left += [(each, depth + 1) for each in _attributes(value)]
    return found


def _attributes(value: object) -> Iterable[Any]:
    """The values of an object's own attributes."""
    slots = (name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ()) if name[:2] != "__")
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]


_PLAIN = {torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None)}


_ALIGNMENT = 64
"""Bytes. torch allocates at multiples of it."""


def aligned(values: T) -> T:
    """The same values, with copies of the floating-point tensors in host memory that begin within a vector of 64 bytes.

    MKL's products of matrices round differently at addresses that are no multiple of 16 (measured in float64, and in float32 products
    with a vector). A view of a slice begins at another address in a batch of other slices.
    """

    def copied(leaf: Any) -> Any:
        is_ours = isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and leaf.is_floating_point()
        return leaf.clone() if is_ours and leaf.layout is torch.strided and leaf.data_ptr() % _ALIGNMENT else leaf

    copies: T = tree_map(copied, values)
    return copies


def cast(values: T, dtype: torch.dtype) -> T:
    """The same values with all floating-point tensors cast to `dtype`."""
    cast_all: T = tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf, values
    )
    return cast_all
