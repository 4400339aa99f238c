"""Gathers that are begun before they are needed, in the order of the step before.

As DeepSpeed's `stage3_prefetch_bucket_size` does (zero/partitioned_param_coordinator.py), and FSDP2's `set_modules_to_forward_prefetch`
by hand. What is begun when follows from the recorded order and from which units were gathered since, both the same on all ranks, never
from time: so all ranks issue the same collectives in the same order.
"""

from mpitrain.sharding.unit.unit import Unit, UnitState


class Prefetch:
    """The order in which units are gathered, of forwards and of backwards each, and what of the next is under way already.

    `limit`: bytes of full parameters that are gathered, or being gathered, and not used yet. A pass that departs from the record goes
    on without it, and its own order is the record from then on; which is followed once it has come twice, so that a model whose
    passes differ from each other gathers nothing in vain.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._records: dict[str, list[Unit]] = {}
        self._departed: set[str] = set()  # kinds of pass whose last two differed
        self._kind = ""  # of the pass that goes on
        self._order: list[Unit] = []  # of it, so far
        self._expected: list[Unit] = []
        self._next = 0  # in what is expected: the first that has not been begun
        self._ahead: dict[Unit, None] = {}  # begun and not used

    def begin(self, kind: str) -> None:
        """A pass begins: "forward" or "backward"."""
        self._kind, self._order, self._next = kind, [], 0
        self._expected = [] if kind in self._departed else self._records.get(kind, [])
        self._look_ahead()

    def used(self, unit: Unit) -> None:
        """A unit was gathered because it was needed."""
        self._ahead.pop(unit, None)
        at = len(self._order)
        self._order.append(unit)
        if self._expected:
            if at < len(self._expected) and self._expected[at] is unit:
                self._next = max(self._next, at + 1)
            else:
                self._expected = []
        self._look_ahead()

    def _look_ahead(self) -> None:
        while self._next < len(self._expected):
            unit = self._expected[self._next]
            if unit.state is not UnitState.SHARDED or not unit.overlaps:  # in use still, or nothing would be won
                return
            if sum(each.nbytes for each in self._ahead) + unit.nbytes > self._limit:
                return
            unit.begin_unshard()
            self._ahead[unit] = None
            self._next += 1

    def end(self) -> None:
        """The pass has ended: give back what was begun in vain, and keep its order."""
        if not self._kind:
            return
        self._drop()
        before = self._records.get(self._kind, self._order)
        (self._departed.discard if before == self._order else self._departed.add)(self._kind)
        self._records[self._kind] = self._order
        self._kind, self._expected = "", []

    def reset(self) -> None:
        """The pass was broken off by an exception: its order says nothing."""
        self._drop()
        self._kind, self._expected = "", []

    def forget(self) -> None:
        """The ranks had different orders."""
        self._records.clear()
        self._departed.clear()

    def _drop(self) -> None:
        for unit in self._ahead:
            unit.reshard()
        self._ahead.clear()
