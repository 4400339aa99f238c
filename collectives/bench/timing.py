"""The time of each contestant at one size: as many rounds as fit the time there is."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from collectives.arrays.dtypes import DType
from collectives.bench.calls import Entrants, Key, TimedCall, timed_calls
from collectives.bench.kit.turns import slowest, take_turns
from collectives.bench.results import Measurement, Skipped, bus_factor
from collectives.communicator.communicator import Communicator

WARM_UP = 3  # calls that are not counted: the first calls set up connections and touch pages
LEAST_ROUNDS = 5


class Limits(NamedTuple):
    """How long one size may take: at most `rounds`, as many of them as fit `seconds`, but `least` (or `rounds`, if fewer).

    `hopeless`: a contestant that took so many times the best one's time while warming up is not timed again.
    `quantile`: which of the rounds' times is the result; the median.
    """

    rounds: int = 200
    seconds: float = 2.0
    hopeless: float = float("inf")
    least: int = LEAST_ROUNDS
    quantile: float = 0.5


def time_in_turn(comm: Communicator, calls: Mapping[Key, TimedCall], limits: Limits) -> dict[Key, tuple[float, int]]:
    """For each of `calls` the median (or quantile) over the rounds of the slowest rank's seconds, and the rounds. Collective."""
    if not calls:
        return {}  # where the node's memory is too small
    warm = {}
    for key, call in calls.items():
        taken: list[float] = []
        # Once is enough for a call that takes long.
        while len(taken) < WARM_UP and not comm.broadcast_object(sum(taken) > limits.seconds / (2 * len(calls))):
            taken.append(call.turn(0)["call"])
        warm[key] = np.array([min(taken)])
    first = {key: float(seconds[0]) for key, seconds in slowest(comm, warm).items()}
    playing = {key: call for key, call in calls.items() if first[key] <= limits.hopeless * min(first.values())}
    # A barrier costs time too, and where there are more ranks than cores as much as a call.
    a_round = sum(first[key] for key in playing) + 20e-6 * len(playing)
    num_rounds = min(limits.rounds, max(limits.least, int(limits.seconds / a_round)))
    series = slowest(comm, take_turns(playing, rounds=comm.broadcast_object(num_rounds)))
    timed = {key: (float(np.quantile(taken, limits.quantile)), len(taken)) for (key, _), taken in series.items()}
    return {key: timed.get(key, (first[key], 1)) for key in calls}


def measure(
    comm: Communicator, operation: str, size: int, dtype: DType, entrants: Entrants, limits: Limits
) -> tuple[list[Measurement], list[Skipped]]:
    """Time all contestants at `size` bytes of the whole array, rounded to whole elements a rank. Collective."""
    count = max(1, size // (dtype.itemsize * comm.size)) * comm.size
    calls, skipped = timed_calls(comm, operation, count, dtype, entrants)
    nbytes = count * dtype.itemsize
    factor = bus_factor(operation, comm.size)
    results = [
        Measurement(operation, dtype.name, nbytes, *key, seconds, nbytes / seconds, nbytes / seconds * factor, rounds)
        for key, (seconds, rounds) in time_in_turn(comm, calls, limits).items()
    ]
    return results, [Skipped(operation, dtype.name, *key, reason) for key, reason in skipped.items()]
