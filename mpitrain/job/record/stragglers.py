"""Ranks that take longer than the others, and why. Pure: no torch, no MPI.

A rank is compared with the ranks that have the same work: the same stage, and parts of the same number of parameters. Of these a rank
with more rows may take as long as its rows in proportion, and one with fewer rows as long as the others. Both limits are too high
rather than too low, because a part of the time does not depend on the rows.
"""

import statistics
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

FACTOR = 1.25
"""A slow step takes a rank so many times the median time of the others."""
IN_A_ROW = 20
"""Slow steps in a row that make a straggler."""
LEAST_S = 5.0
"""The time of these steps on the slow rank. Where ranks share cores, the system favours some of them for up to seconds."""


class RankTimes(NamedTuple):
    """How each rank spent a step, without communication and its waits: a value for each rank, in seconds but for `rows`."""

    busy_s: np.ndarray
    data_s: np.ndarray
    """Of it, in waits for data."""
    cpu_s: np.ndarray
    """CPU time of the main thread in the whole step."""
    delay_s: np.ndarray
    """Time in the whole step in which the main thread was ready to run and had no core; NaN if it is not known."""
    rows: np.ndarray

    def causes(self) -> dict[str, np.ndarray]:
        """Seconds of each rank that are not computation, by cause: see CAUSES."""
        delay_s = np.nan_to_num(self.delay_s)
        # A thread that waits for other ranks may use CPU time. So this is at most the time in which the rank was blocked, and
        # nearly that time on a rank for which the others wait.
        blocked_s = self.busy_s - self.data_s - self.cpu_s - delay_s
        return {"data": self.data_s, "cpu": delay_s, "blocked": blocked_s.clip(0.0)}


CAUSES = {
    "data": "it waits for its data",
    "cpu": "its core is shared with another process: it is ready to run and has no core",
    "blocked": "it sleeps: does it wait for a disk, a lock or a device?",
    "compute": "it computes more slowly: is its processor hot, clocked down, or of another kind?",
}
"""Why a rank is slow."""


class Straggler(NamedTuple):
    """A rank that has been slow in each of the last `steps`. `factor`: how many times the others' median, in the median step."""

    rank: int
    steps: int
    factor: float
    seconds: float
    """The time that the others may have waited for it in these steps."""
    cause: str
    """A key of CAUSES."""
    cause_s: float
    """The time that the cause has added to a step."""

    @property
    def words(self) -> str:
        """The cause, in words."""
        return f"{CAUSES[self.cause]} ({self.cause_s * 1e3:.0f} ms of a step more than the other ranks)"


class _Slow(NamedTuple):
    """One slow step: its and the usual seconds, and what each cause has added."""

    its: float
    usual: float
    added: dict[str, float]


class Stragglers:
    """The slow steps in a row of each rank. `work`: for each rank what it computes; ranks with equal values have the same work."""

    def __init__(self, work: Sequence[Hashable]) -> None:
        self._groups = _groups_of(work)
        self._slow: dict[int, list[_Slow]] = {}
        self._told: set[int] = set()

    def step(self, ranks: RankTimes) -> list[Straggler]:
        """The ranks that have become stragglers by one more step, in order. `ranks`: how they spent it.

        A straggler is returned once; again only after a step in which it was not slow.
        """
        now = dict(slow for group in self._groups for slow in _slow_of(group, ranks))
        self._told &= now.keys()
        self._slow = {rank: [*self._slow.get(rank, ()), its] for rank, its in now.items() if rank not in self._told}
        found = []
        for rank, slow in sorted(self._slow.items()):
            if len(slow) >= IN_A_ROW and sum(each.its for each in slow) >= LEAST_S:
                factor = statistics.median(each.its / each.usual for each in slow)
                added = {cause: statistics.median(each.added[cause] for each in slow) for cause in CAUSES}
                cause = max(added, key=lambda name: added[name])
                seconds = sum(each.its - each.usual for each in slow)
                found.append(Straggler(rank, len(slow), factor, seconds, cause, added[cause]))
                self._told.add(rank)
        return found

    def forget(self) -> None:
        """Begin anew, after the steps were interrupted."""
        self._slow, self._told = {}, set()


def slow_on_average(work: Sequence[Hashable], ranks: RankTimes) -> list[Straggler]:
    """The ranks that are slow in the mean of some steps, by the rule of a single step. `ranks`: how they spent it."""
    found = []
    for rank, slow in (each for group in _groups_of(work) for each in _slow_of(group, ranks)):
        cause = max(slow.added, key=lambda name: slow.added[name])
        found.append(Straggler(rank, 1, slow.its / slow.usual, slow.its - slow.usual, cause, slow.added[cause]))
    return found


def _groups_of(work: Sequence[Hashable]) -> list[np.ndarray]:
    """The ranks with the same work, where there are several."""
    groups: dict[Hashable, list[int]] = {}
    for rank, its in enumerate(work):
        groups.setdefault(its, []).append(rank)
    return [np.array(ranks) for ranks in groups.values() if len(ranks) > 1]


def _slow_of(group: np.ndarray, ranks: RankTimes) -> Iterator[tuple[int, _Slow]]:
    """The ranks of a group with the same work that were slow in a step."""
    busy = ranks.busy_s[group]
    # Not more than the median of the others, whoever they are: with many ranks few pass this.
    least = np.sort(busy)[(len(group) - 2) // 2]
    for rank in group[busy > FACTOR * least].tolist():
        others = group[(group != rank) & (ranks.rows[group] > 0)]
        if not len(others):
            continue
        usual = float(np.median(ranks.busy_s[others] * (ranks.rows[rank] / ranks.rows[others]).clip(1.0)))
        its = float(ranks.busy_s[rank])
        if its > FACTOR * usual > 0:
            added = {cause: float(each[rank] - np.median(each[others])) for cause, each in ranks.causes().items()}
            added["compute"] = its - usual - sum(max(seconds, 0.0) for seconds in added.values())
            yield rank, _Slow(its, usual, added)
