"""Which copies are wrong. Pure: no torch, no MPI."""

from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple


class Verdict(NamedTuple):
    """What a comparison of copies says."""

    suspects: tuple[int, ...]
    """The ranks whose copies differ from those of the majority; without a majority, all ranks whose copies differ from one another."""
    is_clear: bool
    """Whether more than half of the ranks agree, so that the others are wrong."""


def judge(values: Mapping[int, Hashable]) -> Verdict | None:
    """Compare the values that ranks have of one thing; None if all agree."""
    by_value: dict[Hashable, list[int]] = {}
    for rank, value in values.items():
        by_value.setdefault(value, []).append(rank)
    if len(by_value) < 2:
        return None
    most = max(by_value.values(), key=len)
    is_clear = 2 * len(most) > len(values)
    wrong = [rank for ranks in by_value.values() if not (is_clear and ranks is most) for rank in ranks]
    return Verdict(tuple(sorted(wrong)), is_clear)


def together(verdicts: Iterable[Verdict]) -> Verdict:
    """One verdict from those on several things. Ranks that a clear one names stand before all pairs that only differ."""
    verdicts = list(verdicts)
    clear = {rank for verdict in verdicts if verdict.is_clear for rank in verdict.suspects}
    # One rank that is wrong explains each pair that it is in.
    unclear = {
        rank
        for verdict in verdicts
        if not verdict.is_clear and not clear & set(verdict.suspects)
        for rank in verdict.suspects
    }
    return Verdict(tuple(sorted(clear | unclear)), not unclear)
