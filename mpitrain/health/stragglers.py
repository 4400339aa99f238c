"""Ranks that compute slower than the others. Pure: no torch, no MPI.

A rank is compared with the ranks that have the same work: the same stage, and parts of the same number of parameters. Of these a rank
with more rows may take as long as its rows in proportion, and one with fewer rows as long as the others. Both limits are too high
rather than too low, because a part of the time does not depend on the rows.
"""

import statistics
from collections.abc import Hashable, Sequence
from typing import NamedTuple

FACTOR = 1.25
"""A slow step takes a rank so many times the median time of the others."""
IN_A_ROW = 20
"""Slow steps in a row that make a straggler."""
LEAST_S = 5.0
"""The time of these steps on the slow rank. Where ranks share cores, the system favours some of them for up to seconds."""


class Straggler(NamedTuple):
    """A rank that has been slow in each of the last `steps`. `factor`: how many times the others' median, in the median step."""

    rank: int
    steps: int
    factor: float
    seconds: float
    """The time that the others may have waited for it in these steps."""


class Stragglers:
    """The slow steps in a row of each rank. `work`: for each rank what it computes; ranks with equal values have the same work."""

    def __init__(self, work: Sequence[Hashable]) -> None:
        self._peers = [
            [other for other, its in enumerate(work) if its == mine and other != rank] for rank, mine in enumerate(work)
        ]
        self._slow: list[list[tuple[float, float]]] = [
            [] for _ in work
        ]  # its and the usual seconds of slow steps in a row
        self._is_told = [False] * len(work)

    def step(self, seconds: Sequence[float], rows: Sequence[float]) -> list[Straggler]:
        """The ranks that have become stragglers by one more step. `seconds`, `rows`: of each rank in this step.

        A straggler is returned once; again only after a step in which it was not slow.
        """
        found = []
        for rank, peers in enumerate(self._peers):
            allowed = [seconds[other] * max(rows[rank] / rows[other], 1.0) for other in peers if rows[other]]
            usual = statistics.median(allowed) if allowed else 0.0
            if not seconds[rank] > FACTOR * usual > 0:
                self._slow[rank], self._is_told[rank] = [], False
                continue
            if self._is_told[rank]:
                continue
            slow = self._slow[rank]
            slow.append((seconds[rank], usual))
            if len(slow) >= IN_A_ROW and sum(its for its, _ in slow) >= LEAST_S:
                factor = statistics.median(its / usual for its, usual in slow)
                found.append(Straggler(rank, len(slow), factor, sum(its - usual for its, usual in slow)))
                self._slow[rank], self._is_told[rank] = [], True
        return found

    def forget(self) -> None:
        """Begin anew, after the steps were interrupted."""
        self._slow = [[] for _ in self._slow]
        self._is_told = [False] * len(self._is_told)
