"""Divides a model's blocks over the stages of a pipeline, so that the stages take about equally long."""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from torch import nn

from mpitrain.parts import part_of
from mpitrain.stages.plan import StagePlan


def costs_of(model: nn.Module, plan: StagePlan) -> tuple[float, list[float], float]:
    """The cost of the modules before the blocks, of each block, and of the modules after them.

    The cost is the number of elements of the matrices, as each multiplies and adds once for a token. A look-up in an embedding costs
    nothing, and a tied matrix counts where it is multiplied. Of a matrix that is cut over ranks each rank counts an equal part, so that
    all of them divide the model alike.
    """
    blocks = model.get_submodule(plan.blocks)
    before, after = (sum(_cost(model.get_submodule(name)) for name in names) for names in (plan.first, plan.last))
    return before, [_cost(block) for block in blocks.children()], after


def _cost(module: nn.Module) -> float:
    looked_up = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    return float(sum(_size(p) for p in module.parameters() if p.ndim > 1 and id(p) not in looked_up))


def _size(param: nn.Parameter) -> float:
    part = part_of(param)
    return param.numel() if part is None or not part.is_cut else prod(part.full_shape) / part.over.size


def divide(before: float, blocks: Sequence[float], after: float, num_stages: int) -> list[range]:
    """The blocks of each stage. The most expensive stage is as cheap as possible. The last stage may have no block.

    `before` and `after` are costs of the first and the last stage besides their blocks. ValueError for more stages than blocks + 1.
    """
    count = len(blocks)
    if num_stages > count + 1:
        raise ValueError(
            f"pipeline: {num_stages} stages need at least {num_stages - 1} blocks, and the model has {count}"
        )
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
