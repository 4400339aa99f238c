"""The gathers of a step: those that begin before their unit is used, and a check that all ranks gather the same units in one order.

Prefetch follows the order of the last step. DeepSpeed's `stage3_prefetch_bucket_size` (zero/partitioned_param_coordinator.py) does the
same, and FSDP2's `set_modules_to_forward_prefetch` by hand. The recorded order and the units gathered since decide when a gather
begins. Both are the same on all ranks, and time has no influence. So all ranks issue the same collectives in the same order.

Without the check, parameters of different units could mix unnoticed.
"""

import zlib
from collections.abc import Sequence

import torch

from mpitrain.sharding.unit.unit import Unit, UnitState


class Prefetch:
    """The order in which forwards and backwards gather units, and the gathers that have begun ahead.

    `limit`: the bytes of full parameters that may be gathered, or under way, before their use. If a pass departs from the recorded
    order, it continues without prefetches, and its own order becomes the record. The next passes follow this record once two passes had
    the same order, so a model whose passes differ gathers no unit without need.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._records: dict[str, list[Unit]] = {}
        self._departed: set[str] = set()  # kinds of pass whose last two orders differed
        self._kind = ""  # kind of the current pass
        self._order: list[Unit] = []  # order of the current pass so far
        self._expected: list[Unit] = []
        self._next = 0  # in `_expected`: the first unit that has not begun
        self._ahead: dict[Unit, None] = {}  # units that have begun and are not used yet

    def begin(self, kind: str) -> None:
        """Begin a pass: "forward" or "backward"."""
        self._kind, self._order, self._next = kind, [], 0
        self._expected = [] if kind in self._departed else self._records.get(kind, [])
        self._look_ahead()

    def used(self, unit: Unit) -> None:
        """Record that a unit was gathered for its use."""
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
            if unit.state is not UnitState.SHARDED or not unit.overlaps:  # still in use, or without overlap
                return
            if sum(each.nbytes for each in self._ahead) + unit.nbytes > self._limit:
                return
            unit.begin_unshard()
            self._ahead[unit] = None
            self._next += 1

    def end(self) -> None:
        """End the pass: free units that it did not use, and record its order."""
        if not self._kind:
            return
        self._free()
        before = self._records.get(self._kind, self._order)
        (self._departed.discard if before == self._order else self._departed.add)(self._kind)
        self._records[self._kind] = self._order
        self._kind, self._expected = "", []

    def abandon(self) -> None:
        """End the pass after an exception, without a record of its order."""
        self._free()
        self._kind, self._expected = "", []

    def reset(self) -> None:
        """Begin again without records, because the ranks had different orders."""
        self._records.clear()
        self._departed.clear()

    def _free(self) -> None:
        for unit in self._ahead:
            unit.reshard()
        self._ahead.clear()


class Gathers:
    """A checksum of the order in which this rank has gathered `units` since the last comparison of the ranks."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._numbers = {id(unit): number for number, unit in enumerate(units)}
        self._checksum = 0

    def note(self, unit: Unit) -> None:
        """Record that this rank has gathered a unit."""
        self._checksum = zlib.crc32(self._numbers[id(unit)].to_bytes(4), self._checksum)

    def both_ways(self) -> list[int]:
        """The checksum's bytes and their complements: the maximum over the ranks shows whether all checksums are equal."""
        mine = self._checksum.to_bytes(4)
        return [*mine, *(255 - byte for byte in mine)]

    def reset(self) -> None:
        """Begin another checksum, after a comparison."""
        self._checksum = 0

    def check(self, most: torch.Tensor) -> None:
        """RuntimeError on all ranks if the checksums differ. `most`: the maximum of all ranks' `both_ways`."""
        highest, lowest = most.tensor_split(2)
        self.reset()
        if not torch.equal(highest, 255 - lowest):
            raise RuntimeError(
                "the ranks ran different sharded modules, or in different orders, so gathered parameters and results are wrong: "
                "all ranks must run the same modules in private storage; shard modules that differ between ranks (experts) as one, by "
                "fully_shard(their_parent, units='one') first, or pass storage='resident'"
            )
