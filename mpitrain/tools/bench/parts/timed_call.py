"""The contestant of these benchmarks."""

from collections.abc import Callable
from typing import Any, NamedTuple

from collectives import Communicator
from collectives.bench.kit.turns import Seconds, timed


class TimedCall(NamedTuple):
    """A contestant (see collectives/bench/kit/turns.py) with one action, "step"."""

    comm: Communicator
    step: Callable[[], Any]

    def turn(self, round_: int) -> Seconds:
        return {"step": timed(self.comm, self.step)}
