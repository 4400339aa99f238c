"""Intervals of samples that a run leaves out. Pure arithmetic on positions in the data."""

from collections.abc import Iterable, Sequence

import numpy as np

Interval = tuple[int, int]
"""The samples `begin` to `end - 1`."""


def merged(intervals: Iterable[Sequence[int]]) -> list[Interval]:
    """The same samples as intervals in order that do not touch. Empty intervals vanish."""
    found: list[Interval] = []
    for begin, end in sorted((int(begin), int(end)) for begin, end in intervals):
        if begin >= end:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def moved_past(first: int, count: np.ndarray, left_out: Sequence[Interval]) -> np.ndarray:
    """The positions of the samples number `count` (from 0) among those from `first` on that are not left out.

    Args:
        first: a position.
        count: int64, any shape.
        left_out: the result of `merged`.
    """
    positions = first + count
    for begin, end in left_out:
        if end > first:
            positions = np.where(positions >= max(begin, first), positions + (end - max(begin, first)), positions)
    return positions
