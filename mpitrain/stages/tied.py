"""Marks the parameters of a rank's stages, and adds up gradients of those that stages of several ranks have (tied weights).

[Note: tied slices] Without a pipeline one backward adds up the gradients of all uses of a weight. With slices each backward must give
the same bits in stages. So the two ranks of a tied weight add up its gradients slice by slice: the rank of the later stage *lends* its
gradient. It sends it to the rank of the first stage after each backward, and takes no part in its sum over the slices. The backward of
the first stage adds its own gradient, as autograd does. At the end of the step the lender gets the result. Each message arrives before
the backward that needs it would begin anyway, so no rank waits for a rank that waits for it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from collectives import Communicator, Work
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


_TAG = 0  # no other message of these groups has a tag


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

    def check_slices(self) -> None:
        """ValueError for a parameter of more than two ranks: the order in which autograd adds up its gradients is not kept."""
        for name, group in self._params:
            if group.size > 2:
                raise ValueError(
                    f"{name} is in stages of {group.size} ranks; with slices expected at most two, as of an embedding tied to the head"
                )

    def rounds(self, model: nn.Module) -> "TiedRounds":
        """The exchange of gradients in a step of a sharded model with slices."""
        sharded: Any = model  # only `fully_shard` makes slices
        params = [(model.get_parameter(name), group) for name, group in self._params]
        return TiedRounds([(sharded.full_parameter(param), group) for param, group in params if param.requires_grad])

    def add(self, model: nn.Module, earlier: Sequence[torch.Tensor | None], *, is_lent: bool) -> None:
        """Add up the gradients of this step over the ranks, and add those of `earlier` steps. Collective.

        `is_lent`: the first rank has the sums already: see [Note: tied slices].
        """
        for (name, group), before in zip(self._params, earlier, strict=True):
            param = model.get_parameter(name)
            if not param.requires_grad:
                continue
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            if is_lent:
                group.broadcast(grad, 0)
            else:
                group.all_reduce(grad)
            param.grad = grad if before is None else before.add_(grad)


class TiedRounds:
    """The exchange of a step: see [Note: tied slices]. `params`: the full parameters, each with its two ranks."""

    def __init__(self, params: Sequence[tuple[nn.Parameter, Communicator]]) -> None:
        self._lent = [(full, group) for full, group in params if group.rank > 0]
        self._summed = [(full, group) for full, group in params if group.rank == 0]
        self._sent: list[tuple[Work, torch.Tensor]] = []

    def before_backward(self) -> None:
        """Let the backward add its gradients to those that the other rank has sent."""
        for full, group in self._summed:
            grad = torch.empty_like(full)
            group.recv(grad, 1, _TAG)
            full.grad = grad

    def after_backward(self) -> None:
        """Send the gradients that are lent."""
        for full, group in self._lent:
            grad, full.grad = torch.zeros_like(full) if full.grad is None else full.grad, None
            self._sent.append((group.isend(grad, 0, _TAG), grad))
        while self._sent and self._sent[0][0].done():
            self._sent.pop(0)[0].wait()

    def end(self) -> None:
        """Wait until the other ranks have what this one has sent."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()


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
