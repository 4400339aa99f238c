"""Marks the parameters of a rank's stages, and adds up gradients of those that stages of several ranks have (tied weights).

[Note: tied slices] Without a pipeline one backward adds up the gradients of all uses of a weight. With slices each backward must give
the same bits in stages. So the two stages of a tied weight add up its gradients slice by slice: the later stage *lends* its gradient.
It passes it on to the first stage after each backward, and takes no part in its sum over the slices. The round of the first stage adds
its own gradient, as autograd does. At the end of the step the rank of the later stage, if it is another one, gets the result. If a
backward is in two halves, the first half computes all of the lent gradient. So each message arrives before the round that needs it
would begin anyway, and no rank waits for a rank that waits for it.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from collectives import Communicator, Work
from mpitrain.placement import parts
from mpitrain.placement.axes import group_among, group_of
from mpitrain.placement.marks import mark_cut, mark_replaced
from mpitrain.placement.part_tensor import watch_state_dicts
from mpitrain.stages.schedules import Schedule


def stages_of_params(model: nn.Module, names_of_stages: Sequence[Sequence[str]]) -> dict[nn.Parameter, frozenset[int]]:
    """The stages that have each parameter of the whole model. Modules that no stage names are in all stages."""
    stages: dict[nn.Parameter, frozenset[int]] = {}
    for stage, names in enumerate(names_of_stages):
        for param in (param for name in names for param in model.get_submodule(name).parameters()):
            stages[param] = stages.get(param, frozenset()) | {stage}
    everywhere = frozenset(range(len(names_of_stages)))
    return {param: stages.get(param, everywhere) for param in model.parameters()}


_TAG = 0  # no other message of these groups has a tag


class _Shared(NamedTuple):
    """A parameter that several stages have. `ranks`: of these stages; None: they are all on this rank."""

    name: str
    stages: list[int]
    ranks: Communicator | None


class Tied:
    """The parameters that several stages have, of this rank.

    Each of the ranks computes a part of the gradient. The parts are added up once a step. `fully_shard` gives a parameter of several
    ranks a buffer of its own, so each of them has the same rows of it.
    """

    def __init__(self, shared: Sequence[_Shared], schedule: Schedule) -> None:
        self._shared, self._schedule = shared, schedule
        self._params = [(each.name, each.ranks) for each in shared if each.ranks is not None]

    def take(self, model: nn.Module) -> list[torch.Tensor | None]:
        """Take the gradients from earlier steps: they are sums already."""
        earlier = []
        for name, _ in self._params:
            param = model.get_parameter(name)
            earlier.append(param.grad)
            param.grad = None
        return earlier

    def check_slices(self) -> None:
        """ValueError for a parameter of more than two stages: the order in which autograd adds up its gradients is not kept.

        The first stage must be on the first rank, which has the sum at the end.
        """
        for name, stages, _ in self._shared:
            ranks = [self._schedule.rank_of(stage) for stage in stages]
            if len(stages) > 2 or ranks != sorted(ranks):
                raise ValueError(
                    f"{name} is in the stages {stages} on ranks {ranks}; with slices expected at most two stages, the first on the "
                    "lower rank, as of an embedding tied to the head"
                )

    def rounds(self, model: nn.Module) -> "TiedRounds":
        """The exchange of gradients in a step of a sharded model with slices."""
        sharded: Any = model  # only `fully_shard` makes slices
        params = [(model.get_parameter(each.name), each) for each in self._shared]
        return TiedRounds([(sharded.full_parameter(param), each) for param, each in params if param.requires_grad])

    def add(self, model: nn.Module, earlier: Sequence[torch.Tensor | None], *, is_lent: bool) -> None:
        """Add up the gradients of this step over the ranks, and add those of `earlier` steps. Collective.

        `is_lent`: the first rank has the sums already: see [Note: tied slices]. A gradient that no rank has stays None.
        """
        params = [(model.get_parameter(name), group) for name, group in self._params]
        are_used = _used_anywhere([(param, group) for param, group in params if param.requires_grad])
        for (param, group), before in zip(params, earlier, strict=True):
            if param not in are_used:
                param.grad = before
                continue
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            if is_lent:
                group.broadcast(grad, 0)
            else:
                group.all_reduce(grad)
            param.grad = grad if before is None else before.add_(grad)


def _used_anywhere(params: Sequence[tuple[nn.Parameter, Communicator]]) -> set[nn.Parameter]:
    """Those that have a gradient on some of their ranks. Collective."""
    of_groups: dict[Communicator, list[nn.Parameter]] = {}
    for param, group in params:
        of_groups.setdefault(group, []).append(param)
    found: set[nn.Parameter] = set()
    for group, its in of_groups.items():
        used = torch.tensor([param.grad is not None for param in its])
        group.all_reduce(used, "max")
        found |= {param for param, anywhere in zip(its, used.tolist(), strict=True) if anywhere}
    return found


class TiedRounds:
    """The exchange of a step: see [Note: tied slices]. `shared`: the full parameters, each with its two stages."""

    def __init__(self, shared: Sequence[tuple[nn.Parameter, _Shared]]) -> None:
        self._shared = shared
        self._here: dict[nn.Parameter, deque[torch.Tensor | None]] = {full: deque() for full, _ in shared}
        self._sent: list[tuple[Work, torch.Tensor]] = []

    def lent_by(self, stage: int) -> list[nn.Parameter]:
        """The parameters whose gradients a stage lends."""
        return [full for full, (_, (_, later), _) in self._shared if later == stage]

    def before_round(self, stage: int) -> None:
        """Let a round add its gradients to those that the later stage has passed on."""
        for full, (_, (first, _), ranks) in self._shared:
            if first != stage or (ranks is not None and ranks.rank > 0):
                continue
            if ranks is None:
                full.grad = self._here[full].popleft()
                continue
            is_used = torch.empty(1, dtype=torch.bool)
            ranks.recv(is_used, 1, _TAG)
            if is_used:
                full.grad = torch.empty_like(full)
                ranks.recv(full.grad, 1, _TAG)

    def after_backward(self, stage: int) -> None:
        """Pass on the gradients that the stage lends, after its backward or the first half of it."""
        for full, (_, (_, later), ranks) in self._shared:
            if later != stage:
                continue
            grad, full.grad = full.grad, None
            if ranks is None:
                self._here[full].append(grad)
                continue
            for sent in (torch.tensor([grad is not None]), grad):
                if sent is not None:
                    self._sent.append((ranks.isend(sent, 0, _TAG), sent))
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
    stages: Mapping[nn.Parameter, frozenset[int]],
    schedule: Schedule,
    comm: Communicator,
) -> Tied:
    """Mark the parameters of this rank as parts of a model in stages, and those of other ranks as replaced. Collective.

    `before`: the parameters of the whole model. `stages`: those that have each of them.
    """
    ranks = {param: frozenset(map(schedule.rank_of, some)) for param, some in stages.items()}
    groups = {some: group_among(comm, some) for some in dict.fromkeys(ranks.values()) if len(some) > 1}
    shared, here = [], dict(model.named_parameters())
    for name, param in here.items():
        is_cut = (part := parts.part_of(param)) is not None
        part = part or parts.whole(param.shape, group_of(comm, 1), is_partial=False)
        part.stages, part.tied = comm, groups.get(ranks[param])
        # None for a parameter of another stage, in a module that stays because it shares another one.
        part.stage = min((stage for stage in stages[param] if schedule.rank_of(stage) == comm.rank), default=None)
        if not is_cut:
            mark_cut(param, name, part)
        if len(stages[param]) > 1:
            shared.append(_Shared(name, sorted(stages[param]), part.tied))
    for module in model.modules():
        if not any(part.is_cut for param in module._parameters.values() if (part := parts.part_of(param)) is not None):
            watch_state_dicts(module)  # tensor_parallel has done so for modules that it has cut
    for name, param in before.items():
        if name not in here:
            mark_replaced(param, name, "pipeline")
    return Tied(shared, schedule)
