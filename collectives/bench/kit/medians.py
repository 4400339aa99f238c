"""Medians over several launches. A ratio is formed within each launch, where both sides met the same disturbances."""

from collections.abc import Hashable, Iterable, Mapping
from statistics import median
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


def median_known(values: Iterable[float | None]) -> float | None:
    """The median of the values that are known; None if there is none."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def median_ratio(launches: Iterable[Mapping[K, float]], one: K, other: K) -> float | None:
    """The median over the launches of the first one's seconds over the other's; None if no launch has both."""
    return median_known(seconds[one] / seconds[other] for seconds in launches if one in seconds and other in seconds)
