"""The time of each contestant at one size, in as many rounds as the time limit allows."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from collectives.arrays.dtypes import DType
from collectives.bench.calls import Entrants, Key, TimedCall, timed_calls
from collectives.bench.kit.turns import slowest, take_turns
from collectives.bench.results import Measurement, Skipped, bus_factor
from collectives.communicator.communicator import Communicator

WARM_UP = 3  # calls before the timed ones: the first calls set up connections and touch pages
LEAST_ROUNDS = 5


class Limits(NamedTuple):
    """The limits for one size: as many rounds as fit `seconds`, at least `least`, but never more than `rounds`.

    `hopeless`: a contestant whose warm-up took this many times the fastest one's time is not timed again.
    `quantile`: the quantile of the rounds' times that is the result; by default the median.
    """

    rounds: int = 200
    seconds: float = 2.0
    hopeless: float = float("inf")
    least: int = LEAST_ROUNDS
    quantile: float = 0.5


def time_in_turn(comm: Communicator, calls: Mapping[Key, TimedCall], limits: Limits) -> dict[Key, tuple[float, int]]:
    """For each of `calls` the median (or quantile) over the rounds of the slowest rank's seconds, and the rounds. Collective."""
    if not calls:
        return {}  # node memory is too small
    warm = {}
    for key, call in calls.items():
        taken: list[float] = []
        # A slow call is made only once.
        while len(taken) < WARM_UP and not comm.broadcast_object(sum(taken) > limits.seconds / (2 * len(calls))):
            taken.append(call.turn(0)["call"])
        warm[key] = np.array([min(taken)])
    first = {key: float(seconds[0]) for key, seconds in slowest(comm, warm).items()}
    playing = {key: call for key, call in calls.items() if first[key] <= limits.hopeless * min(first.values())}
    # Each turn has a barrier, which takes as much time as a call if there are more ranks than cores.
    a_round = sum(first[key] for key in playing) + 20e-6 * len(playing)
    num_rounds = min(limits.rounds, max(limits.least, int(limits.seconds / a_round)))
    series = slowest(comm, take_turns(playing, rounds=comm.broadcast_object(num_rounds)))
    timed = {key: (float(np.quantile(taken, limits.quantile)), len(taken)) for (key, _), taken in series.items()}
    return {key: timed.get(key, (first[key], 1)) for key in calls}


def measure(
    comm: Communicator, operation: str, size: int, dtype: DType, entrants: Entrants, limits: Limits
) -> tuple[list[Measurement], list[Skipped]]:
    """Time all contestants at `size` bytes of the whole array, rounded to whole elements for each rank. Collective."""
    count = max(1, size // (dtype.itemsize * comm.size)) * comm.size
    calls, skipped = timed_calls(comm, operation, count, dtype, entrants)
    nbytes = count * dtype.itemsize
    factor = bus_factor(operation, comm.size)
    results = [
        Measurement(operation, dtype.name, nbytes, *key, seconds, nbytes / seconds, nbytes / seconds * factor, rounds)
        for key, (seconds, rounds) in time_in_turn(comm, calls, limits).items()
    ]
    return results, [Skipped(operation, dtype.name, *key, reason) for key, reason in skipped.items()]
