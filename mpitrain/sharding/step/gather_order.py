"""A check that all ranks gather the same units in the same order. Without it, parameters of different units could mix unnoticed."""

import zlib
from collections.abc import Sequence

import torch

from mpitrain.sharding.unit.unit import Unit


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

    def forget(self) -> None:
        """Reset the checksum."""
        self._checksum = 0

    def check(self, most: torch.Tensor) -> None:
        """RuntimeError on all ranks if the checksums differ. `most`: the maximum of all ranks' `both_ways`."""
        highest, lowest = most.tensor_split(2)
        self.forget()
        if not torch.equal(highest, 255 - lowest):
            raise RuntimeError(
                "the ranks ran different sharded modules, or in different orders, so gathered parameters and results are wrong: "
                "all ranks must run the same modules in private storage; shard modules that differ between ranks (experts) as one, by "
                "fully_shard(their_parent, units='one') first, or pass storage='resident'"
            )
