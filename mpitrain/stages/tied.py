"""Marks the parameters of a rank's stages, and adds up gradients of those that stages of several ranks have (tied weights)."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from collectives import Communicator
from mpitrain import parts
from mpitrain.axes import group_among, group_of
from mpitrain.optim.spread import mark_cut, mark_replaced
from mpitrain.part_tensor import watch_state_dicts
from mpitrain.stages.schedules import Schedule


def ranks_of_params(
    model: nn.Module, names_of_stages: Sequence[Sequence[str]], schedule: Schedule
) -> dict[nn.Parameter, frozenset[int]]:
    """The ranks whose stages have each parameter of the whole model. Modules that no stage names are in all stages."""
    ranks: dict[nn.Parameter, frozenset[int]] = {}
    for stage, names in enumerate(names_of_stages):
        for param in (param for name in names for param in model.get_submodule(name).parameters()):
            ranks[param] = ranks.get(param, frozenset()) | {schedule.rank_of(stage)}
    everywhere = frozenset(range(schedule.num_ranks))
    return {param: ranks.get(param, everywhere) for param in model.parameters()}


class Tied:
    """The parameters that stages of several ranks have, by name, each with these ranks.

    Each of the ranks computes a part of the gradient. The parts are added up once a step. `fully_shard` gives such a parameter a buffer
    of its own, so each of the ranks has the same rows of it.
    """

    def __init__(self, params: Sequence[tuple[str, Communicator]]) -> None:
        self._params = params

    def take(self, model: nn.Module) -> list[torch.Tensor | None]:
        """Take the gradients from earlier steps: they are sums already."""
        earlier = []
        for name, _ in self._params:
            param = model.get_parameter(name)
            earlier.append(param.grad)
            param.grad = None
        return earlier

    def add(self, model: nn.Module, earlier: Sequence[torch.Tensor | None]) -> None:
        """Add up the gradients of this step over the ranks, and add those of `earlier` steps. Collective."""
        for (name, group), before in zip(self._params, earlier, strict=True):
            param = model.get_parameter(name)
            if not param.requires_grad:
                continue
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            group.all_reduce(grad)
            param.grad = grad if before is None else before.add_(grad)


def mark(
    model: nn.Module,
    before: Mapping[str, nn.Parameter],
    ranks: Mapping[nn.Parameter, frozenset[int]],
    comm: Communicator,
) -> Tied:
    """Mark the parameters of this rank as parts of a model in stages, and those of other ranks as replaced. Collective.

    `before`: the parameters of the whole model. `ranks`: those of `comm` that have each of them.
    """
    groups = {some: group_among(comm, some) for some in dict.fromkeys(ranks.values()) if len(some) > 1}
    tied, here = [], dict(model.named_parameters())
    for name, param in here.items():
        is_cut = (part := parts.part_of(param)) is not None
        part = part or parts.whole(param.shape, group_of(comm, 1), is_partial=False)
        part.stages, part.tied = comm, groups.get(ranks[param])
        if not is_cut:
            mark_cut(param, name, part)
        if part.tied is not None:
            tied.append((name, part.tied))
    for module in model.modules():
        if not any(part.is_cut for param in module._parameters.values() if (part := parts.part_of(param)) is not None):
            watch_state_dicts(module)  # tensor_parallel has done so for modules that it has cut
    for name, param in before.items():
        if name not in here:
            mark_replaced(param, name, "pipeline")
    return Tied(tied)
