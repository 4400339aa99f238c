"""The rounds: every contestant once a round, in another order each round, each call after a barrier.

Before it each rank writes anew what the call reads, as the computation does that a collective follows. Else a call would pay for
where the one before it, of another contestant, has left the array: in which core's cache, or read by which peer.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from collectives.arrays.dtypes import DType
from collectives.bench.contestants import Contestant, Key, contestants
from collectives.bench.gloo import Gloo
from collectives.bench.results import RAW, Measurement, Skipped, bus_factor
from collectives.communicator.communicator import Communicator

WARM_UP = 3  # rounds that are not counted: the first calls set up connections and touch pages
LEAST_ROUNDS = 5


class Limits(NamedTuple):
    """How long one size may take: at most `rounds`, as many of them as fit `seconds`, but `least` (or `rounds`, if fewer).

    `hopeless`: who took so many times the best one's time while warming up is not timed again.
    `quantile`: which of the rounds' times is the result; the median.
    """

    rounds: int = 200
    seconds: float = 2.0
    hopeless: float = float("inf")
    least: int = LEAST_ROUNDS
    quantile: float = 0.5


def time_in_turn(comm: Communicator, calls: Mapping[Key, Contestant], limits: Limits) -> dict[Key, tuple[float, int]]:
    """For each of `calls` the median (or quantile) over the rounds of the slowest rank's seconds, and the rounds. Collective."""
    keys = list(calls)
    warm = np.full((WARM_UP, len(keys)), np.inf)
    for i, key in enumerate(keys):
        for round_ in range(WARM_UP):
            warm[round_, i] = _timed(comm, calls[key])
            # Once is enough for what takes long.
            if comm.broadcast_object(warm[: round_ + 1, i].sum() > limits.seconds / (2 * len(keys))):
                break
    first = warm.min(axis=0)
    comm.all_reduce(first, "max")
    playing = [i for i in range(len(keys)) if first[i] <= limits.hopeless * first.min()]
    # A barrier costs time too, and where there are more ranks than cores so much as a call.
    a_round = float(first[playing].sum()) + 20e-6 * len(playing)
    num_rounds = min(limits.rounds, max(limits.least, int(limits.seconds / a_round)))
    num_rounds = comm.broadcast_object(num_rounds)

    seconds = np.empty((num_rounds, len(keys)))
    seconds[...] = first
    for round_ in range(num_rounds):
        for i in turns(round_, len(playing)):
            seconds[round_, playing[i]] = _timed(comm, calls[keys[playing[i]]])
    comm.all_reduce(seconds, "max")
    quantiles = np.quantile(seconds, limits.quantile, axis=0).tolist()
    return {key: (quantiles[i], num_rounds if i in playing else 1) for i, key in enumerate(keys)}


def turns(round_: int, num: int) -> list[int]:
    """The order of `num` contestants in a round: drawn, the same on all ranks.

    So nobody has a fixed neighbour, also not one with another between them: the traces of a slow one, in the cache and in the
    scheduler, reach further than to the next call.
    """
    return np.random.default_rng([round_, num]).permutation(num).tolist()


def _timed(comm: Communicator, contestant: Contestant) -> float:
    call, read = contestant
    read[...] = 0
    comm.mpi.Barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(
    comm: Communicator,
    operation: str,
    size: int,
    dtype: DType,
    *,
    limits: Limits = Limits(),  # noqa: B008  (immutable)
    memories: Sequence[str] = ("private", "node"),
    arrays: str = "numpy",
    peers: Sequence[str] = (RAW,),
    gloo: Gloo | None = None,
    fixed_only: bool = False,
    without: Collection[str] = (),
) -> tuple[list[Measurement], list[Skipped]]:
    """Time all contestants (see `contestants`) at `size` bytes of the whole array, rounded to whole elements a rank. Collective."""
    count = max(1, size // (dtype.itemsize * comm.size)) * comm.size
    calls, skipped = contestants(
        comm, operation, count, dtype,
        memories=memories, arrays=arrays, peers=peers, gloo=gloo, fixed_only=fixed_only, without=without,
    )  # fmt: skip
    nbytes = count * dtype.itemsize
    factor = bus_factor(operation, comm.size)
    results = [
        Measurement(operation, dtype.name, nbytes, *key, seconds, nbytes / seconds, nbytes / seconds * factor, rounds)
        for key, (seconds, rounds) in time_in_turn(comm, calls, limits).items()
    ]
    return results, [Skipped(operation, dtype.name, *key, reason) for key, reason in skipped.items()]
