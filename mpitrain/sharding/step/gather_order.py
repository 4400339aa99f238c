"""Whether all ranks gather the same units in the same order: else they gather a mixture, with no error where sizes agree."""

import zlib
from collections.abc import Sequence

import torch

from mpitrain.sharding.unit.unit import Unit


class Gathers:
    """A checksum of what this rank has gathered, of these units, since the ranks last compared."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._numbers = {id(unit): number for number, unit in enumerate(units)}
        self._checksum = 0

    def note(self, unit: Unit) -> None:
        """This rank has gathered a unit."""
        self._checksum = zlib.crc32(self._numbers[id(unit)].to_bytes(4), self._checksum)

    def both_ways(self) -> list[int]:
        """The checksum's bytes, such that the ranks' maximum tells whether it is the same on all."""
        mine = self._checksum.to_bytes(4)
        return [*mine, *(255 - byte for byte in mine)]

    def forget(self) -> None:
        """Begin anew."""
        self._checksum = 0

    def check(self, most: torch.Tensor) -> None:
        """RuntimeError on all ranks if they differ. `most`: the maximum of all ranks' `both_ways`."""
        highest, lowest = most.tensor_split(2)
        self.forget()
        if not torch.equal(highest, 255 - lowest):
            raise RuntimeError(
                "the ranks ran different sharded modules, or in different orders, and what they gathered and computed is wrong: all "
                "ranks must run the same ones in private storage; shard modules of which each rank uses others (experts) as one, by "
                "fully_shard(their_parent, units='one') first, or pass storage='resident'"
            )
