"""The figures of a launch, and how good its predictions are. Neither torch nor MPI."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from collectives.bench.kit.launches import Launch

APART = 0.15
"""Pairs of layouts whose measured times are closer than this share are in no order."""


@dataclass(frozen=True)
class LayoutRow:
    """A layout. Seconds of a step."""

    name: str
    predicted_s: float
    measured_s: float
    """Median over the steps of the slowest rank's time."""
    fastest_s: float

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted_s / self.measured_s


@dataclass(frozen=True)
class ComparisonLaunch(Launch):
    """The figures of one job."""

    FORMAT = 1
    COMMAND = "python -m mpitrain plan --compare MACHINE --json"
    ALIKE = ("machine", "ranks", "nodes", "threads", "size")

    threads: int
    size: str
    """The model and the batch."""
    steps: int
    load: float
    """Processes of the node that ran or waited for a core in the minute before the measurement."""
    rows: Sequence[LayoutRow] = ()


def merged(launches: Sequence[ComparisonLaunch]) -> list[LayoutRow]:
    """The median over the launches of each figure of each layout."""
    every: dict[str, list[LayoutRow]] = {}
    for launch in launches:
        for row in launch.rows:
            every.setdefault(row.name, []).append(row)
    return [
        LayoutRow(
            name,
            median(row.predicted_s for row in rows),
            median(row.measured_s for row in rows),
            min(row.fastest_s for row in rows),
        )
        for name, rows in every.items()
    ]


def median_error(rows: Sequence[LayoutRow]) -> float:
    """The median of |predicted / measured - 1|."""
    return median(abs(row.ratio - 1) for row in rows)


def in_order(rows: Sequence[LayoutRow], apart: float = APART) -> tuple[int, int]:
    """Of the pairs whose measured times are more than `apart` apart: those predicted in the right order, and all."""
    right = count = 0
    for pair in combinations(rows, 2):
        quick, slow = sorted(pair, key=lambda row: row.measured_s)
        if slow.measured_s > (1 + apart) * quick.measured_s:
            count += 1
            right += quick.predicted_s < slow.predicted_s
    return right, count


def excess_of_best(rows: Sequence[LayoutRow]) -> float:
    """The measured time of the layout predicted as best over that of the best one, minus 1."""
    chosen = min(rows, key=lambda row: row.predicted_s)
    return chosen.measured_s / min(row.measured_s for row in rows) - 1
