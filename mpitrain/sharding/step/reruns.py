"""Modules whose forward a backward runs again, for a backward within the backward, as torch's reentrant checkpoint does.

Such a backward accumulates the gradients of a parameter by itself, and another one, of another call, may follow. Nothing in the graph
tells how many. But the calls are known: in the forward they ran without gradients, within a forward that records a graph.
"""

from collections import Counter

from mpitrain.sharding.unit.unit import Unit


class Reruns:
    """The calls of units that may run again."""

    def __init__(self) -> None:
        self._ahead: Counter[Unit] = Counter()  # calls without gradients that have not run again
        self._again: set[Unit] = set()  # units whose modules have run again in this backward
        self._uncertain: set[Unit] = (
            set()
        )  # units with gradients of a backward within the backward that is of no such call
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

    def forget(self) -> None:
        """Forget all calls, because their backward will not come, as after a write to the parameters."""
        self._ahead.clear()
        self._again.clear()
        self._uncertain.clear()
