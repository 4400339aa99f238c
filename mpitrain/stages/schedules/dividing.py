"""Divides blocks over the stages of a pipeline, so that the stages take about equally long. No data, no ranks."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import inf


def divide(before: float, blocks: Sequence[float], after: float, num_stages: int) -> list[range]:
    """The blocks of each stage. The most expensive stage is as cheap as possible. The last stage may have no block.

    `before` and `after` are costs of the first and the last stage besides their blocks. ValueError for more stages than blocks + 1.
    """
    count = len(blocks)
    if num_stages > count + 1:
        raise ValueError(f"{num_stages} stages need at least {num_stages - 1} blocks, and the model has {count}")
    sums = [0.0]
    for cost in blocks:
        sums.append(sums[-1] + cost)
    # worst[end]: of the best division of the first `end` blocks into the stages so far; where[stage][end]: where its last stage begins.
    worst = [before + total for total in sums]
    where: list[array[int]] = []
    for stage in range(1, num_stages):
        is_last = stage == num_stages - 1
        # Each stage before it has a block, and each one after it but the last.
        ends = (count,) if is_last else range(stage + 1, count + 3 + stage - num_stages)
        worst, begins = _with_a_stage(worst, sums, after if is_last else 0.0, stage, ends, least=0 if is_last else 1)
        where.append(begins)
    ends_of_stages = [count]
    for begins in reversed(where):
        ends_of_stages.append(begins[ends_of_stages[-1]])
    return [range(begin, end) for begin, end in pairwise([0, *reversed(ends_of_stages)])]


def _with_a_stage(
    worst: list[float], sums: list[float], extra: float, stage: int, ends: Iterable[int], *, least: int
) -> tuple[list[float], array[int]]:
    """The costs of the best divisions for these ends, and where their last stage begins, which has at least `least` blocks.

    The later it begins, the more the stages before it cost, and the less it costs itself: the best place is where both meet. For a
    later end this is no earlier. Of places of the same cost it is the last one.
    """
    found, begins, meet = [inf] * len(sums), array("i", bytes(4 * len(sums))), stage
    for end in ends:
        most = end - least
        while meet <= most and worst[meet] < sums[end] - sums[meet] + extra:
            meet += 1
        if meet <= most and (meet == stage or worst[meet] <= sums[end] - sums[meet - 1] + extra):
            found[end], begins[end] = worst[meet], bisect_right(worst, worst[meet], meet, most + 1) - 1
        else:
            found[end], begins[end] = sums[end] - sums[meet - 1] + extra, meet - 1
    return found, begins
