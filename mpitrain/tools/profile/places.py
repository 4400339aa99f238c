"""The places of a step, and its seconds by place. Pure: no torch, no MPI."""

from collections import defaultdict
from typing import NamedTuple

Place = tuple[str, str]
"""A layer or another part of a step, and "forward", "backward" or "" (neither)."""

BLOCK = "blocks."
"""The begin of the name of each block: see layer_ranges.py."""
OTHER: Place = ("other", "")
PASSES: Place = ("passes", "")
"""All forwards and backwards of a step."""
GRADIENTS: Place = ("gradients", "")
"""What the passes do after the last layer of a backward: the last reductions end."""
STAGES: Place = ("other stages", "")


class PlaceTimes(NamedTuple):
    """Seconds of one step by place."""

    computed: defaultdict[Place, float]
    """Without communication."""
    communicated: defaultdict[Place, float]
    """With the waits for other ranks. All messages between stages are in the place STAGES."""

    @property
    def total(self) -> float:
        """Of the step."""
        return sum(self.computed.values()) + sum(self.communicated.values())
