"""The costs of a model's blocks, by which they are divided over the stages of a pipeline."""

from math import prod

from torch import nn

from mpitrain.placement.parts import part_of
from mpitrain.plans.stage_plan import StagePlan


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
