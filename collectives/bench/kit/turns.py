"""Contestants, and rounds in which each contestant takes its turn, in a new random order in each round."""

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from collectives.communicator.communicator import Communicator

C = TypeVar("C")
K = TypeVar("K", bound=Hashable)
Seconds = dict[str, float]
"""The seconds of one rank in one turn, by the action."""
Series = dict[tuple[K, str], np.ndarray]
"""The seconds of all counted rounds, by contestant and action."""


class Contestant(Protocol):
    """A library, an algorithm or a layout that is measured."""

    def turn(self, round_: int) -> Seconds:
        """Perform the measured actions once. Collective. The actions are the same on all ranks and in all rounds."""


class CannotTakePart(Exception):  # noqa: N818  (not an error of the job)
    """A contestant cannot be made on these ranks; the text is the reason. Raised on all ranks."""


def make_each(makers: Mapping[K, Callable[[], C]]) -> tuple[dict[K, C], dict[K, str]]:
    """The contestants that the makers return, and the reasons of those that cannot take part. Collective."""
    made: dict[K, C] = {}
    skipped: dict[K, str] = {}
    for name, make in makers.items():
        try:
            made[name] = make()
        except CannotTakePart as reason:
            skipped[name] = str(reason)
    return made, skipped


def take_turns(contestants: Mapping[K, Contestant], *, rounds: int, warm_up: int = 0) -> Series[K]:
    """Let each contestant take its turn in each round; `warm_up` more rounds come first and do not count. Collective.

    Returns this rank's seconds; see `slowest`.
    """
    names = list(contestants)
    taken: dict[K, list[Seconds]] = {name: [] for name in names}
    for round_ in range(warm_up + rounds):
        for i in drawn_order(round_, len(names)):
            seconds = contestants[names[i]].turn(round_)
            if round_ >= warm_up:
                taken[names[i]].append(seconds)
    return {
        (name, action): np.array([seconds[action] for seconds in turns])
        for name, turns in taken.items()
        for action in turns[0]
    }


def drawn_order(round_: int, num: int) -> list[int]:
    """The order of `num` contestants in a round: random, the same on all ranks.

    So a contestant does not always follow the same ones, directly or after one other turn: a slow contestant affects the cache and
    the scheduler for more than the next turn.
    """
    return np.random.default_rng([round_, num]).permutation(num).tolist()


def timed(comm: Communicator, call: Callable[[], Any]) -> float:
    """This rank's seconds in `call`, which all ranks begin after a barrier. Collective."""
    comm.mpi.Barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def slowest(comm: Communicator, series: Mapping[K, np.ndarray]) -> dict[K, np.ndarray]:
    """The slowest rank's seconds in each round, the same on all ranks. Collective."""
    return _over_ranks(comm, series, "max")


def mean_rank(comm: Communicator, series: Mapping[K, np.ndarray]) -> dict[K, np.ndarray]:
    """The mean of all ranks' seconds in each round, the same on all ranks. Collective."""
    return _over_ranks(comm, series, "avg")


def _over_ranks(comm: Communicator, series: Mapping[K, np.ndarray], op: Literal["max", "avg"]) -> dict[K, np.ndarray]:
    seconds = np.array(list(series.values()))
    comm.all_reduce(seconds, op)
    return dict(zip(series, seconds, strict=True))


def spread(seconds: np.ndarray) -> tuple[float, float, float]:
    """The median, the minimum and the maximum."""
    return float(np.median(seconds)), float(seconds.min()), float(seconds.max())
