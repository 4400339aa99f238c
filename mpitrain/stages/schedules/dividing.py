"""Divides blocks over the stages of a pipeline, so that the stages take about equally long. No data, no ranks."""

from collections.abc import Sequence
from itertools import pairwise


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
    worst = [float("inf") if end == 0 and num_stages > 1 else before + total for end, total in enumerate(sums)]
    where: list[list[int]] = []
    for stage in range(1, num_stages):
        least = 0 if stage == num_stages - 1 else 1  # blocks of a stage
        extra = after if stage == num_stages - 1 else 0.0
        found: list[tuple[float, int]] = [
            min(
                ((max(worst[begin], sums[end] - sums[begin] + extra), -begin) for begin in range(end - least + 1)),
                default=(float("inf"), 0),
            )
            for end in range(count + 1)
        ]
        worst = [cost for cost, _ in found]
        where.append([-begin for _, begin in found])
    ends = [count]
    for begins in reversed(where):
        ends.append(begins[ends[-1]])
    return [range(begin, end) for begin, end in pairwise([0, *reversed(ends)])]
