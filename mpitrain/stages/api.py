"""`pipeline`: a plain model, divided into stages over ranks, in place."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from collectives import Communicator
from mpitrain.agreement import check_alike
from mpitrain.optim.spread import spread_of
from mpitrain.parts import part_of
from mpitrain.stages.division import costs_of, divide
from mpitrain.stages.executor import Run
from mpitrain.stages.messages import Messages, Streams
from mpitrain.stages.model_stages import ModelStages
from mpitrain.stages.plan import StagePlan
from mpitrain.stages.schedules import SCHEDULES, Schedule
from mpitrain.stages.split_linear import split_backwards

Inputs = torch.Tensor | Sequence[Any] | Mapping[str, Any]


def pipeline(
    model: nn.Module,
    comm: Communicator,
    schedule: str = "1f1b",
    *,
    micro_batches: int,
    stages_per_rank: int | None = None,
    plan: StagePlan | None = None,
    division: Sequence[int] | None = None,
) -> "Pipeline":
    """Divide a model into stages over the ranks of `comm`, in place, before `fully_shard`. Collective.

    Each rank keeps the modules of its own stages, under their names. A model on the meta device needs memory for these alone.
    `tensor_parallel` may have cut the model: then the ranks of a group that holds each layer together have the same rank in `comm`.

    Args: schedule: a name of `mpitrain.stages.schedules.SCHEDULES`. micro_batches: the number of forwards of a step. stages_per_rank:
    of "interleaved", 2 or more (default: 2). plan: the parts of the model; None: the model's attribute `stage_plan`. division: the
    number of blocks of each stage; None: stages of about equal cost, with the embedding and the head counted.

    Raises ValueError on all ranks, with the model unchanged, for a schedule, plan or division that does not fit the model or the ranks.
    """
    with comm.together("pipeline"):
        made = _schedule(schedule, comm.size, micro_batches, stages_per_rank)
        plan = plan or getattr(model, "stage_plan", None)
        if plan is None:
            raise ValueError(
                f"{type(model).__name__} brings no plan along (an attribute stage_plan); pass plan=, a mpitrain.stages.StagePlan"
            )
        divided = _division(model, plan, division, made.num_stages)
    described = [f"{name} of shape {tuple(param.shape)}" for name, param in model.named_parameters()]
    check_alike(
        comm,
        [f"schedule {made.name}, {micro_batches} micro-batches", f"stages {divided}", *described],
        caller="pipeline",
        remedy="build the same model on all ranks, and divide it alike",
    )
    return Pipeline(model, comm, made, plan, divided)


def _schedule(name: str, num_ranks: int, num_micro: int, stages_per_rank: int | None) -> Schedule:
    if name not in SCHEDULES:
        raise ValueError(f"pipeline: unknown schedule {name!r}; expected one of {', '.join(SCHEDULES)}")
    if num_micro < 1:
        raise ValueError(f"pipeline: expected at least 1 micro-batch, got {num_micro}")
    if name != "interleaved":
        made = SCHEDULES[name](num_ranks, num_micro)
        if stages_per_rank not in (None, made.stages_per_rank):
            raise ValueError(f"pipeline: {name} has {made.stages_per_rank} stages on each rank, got {stages_per_rank}")
        return made
    if (count := 2 if stages_per_rank is None else stages_per_rank) < 2:
        raise ValueError(f"pipeline: interleaved needs at least 2 stages on each rank, got {count}")
    return SCHEDULES[name](num_ranks, num_micro, count)


def _division(model: nn.Module, plan: StagePlan, counts: Sequence[int] | None, num_stages: int) -> list[range]:
    before, blocks, after = costs_of(model, plan)
    if counts is None:
        return divide(before, blocks, after, num_stages)
    if len(counts) != num_stages or sum(counts) != len(blocks) or min(counts) < 0:
        raise ValueError(
            f"pipeline: expected the numbers of blocks of {num_stages} stages, {len(blocks)} together, got {list(counts)}"
        )
    ends = [sum(counts[:stage]) for stage in range(num_stages + 1)]
    return [range(begin, end) for begin, end in pairwise(ends)]


class Pipeline:
    """The stages of a model on this rank, and the schedule that runs them."""

    def __init__(
        self, model: nn.Module, comm: Communicator, schedule: Schedule, plan: StagePlan, division: Sequence[range]
    ) -> None:
        self.comm, self.schedule, self.division = comm, schedule, division
        mine = [stage for stage in range(schedule.num_stages) if schedule.rank_of(stage) == comm.rank]
        self._tied = _tied(model, plan, division, schedule, comm)
        self.stages = ModelStages(model, plan, division, mine)
        if schedule.splits_backward:
            split_backwards(model)
        self._streams: Streams = {}

    def step(
        self,
        inputs: Sequence[Inputs],
        loss_of: Callable[[Any, int], torch.Tensor] | None = None,
        *,
        last: Sequence[Mapping[str, Any]] | None = None,
        scale: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Forwards and backwards of all micro-batches; the gradients are added to those of the parameters. Collective.

        Args: inputs: for each micro-batch the arguments of the model: a tensor, a sequence or a mapping. The first stage gets all of
        them, the others the named ones. The micro-batches may have different sizes. loss_of(output, micro): the loss of the model's
        output, on the rank of the last stage; None: the output is the loss. last: for each micro-batch, more named arguments for the
        last stage alone, such as the targets. scale: changes a loss before its backward.

        Returns: the sum of the losses, before `scale`: a float64 scalar, the same on all ranks. ValueError on all ranks if the number
        of micro-batches is not that of the schedule.
        """
        schedule, comm = self.schedule, self.comm
        with comm.together("pipeline"):
            for what, given in (("inputs", inputs), ("last", last)):
                if given is not None and len(given) != schedule.num_micro:
                    raise ValueError(f"step: expected {schedule.num_micro} micro-batches, got {len(given)} ({what})")
            calls = [_call(given) for given in inputs]
            shapes = [_shape(call) for call in calls]
        shapes = comm.all_gather_object(shapes)[schedule.rank_of(0)]
        device = next(self.stages.model.parameters()).device
        messages = Messages(comm, schedule, self._streams, shapes, device)
        earlier = self._take_tied()
        run = Run(self.stages, messages, calls, loss_of or _itself, last, scale or _same)
        program = schedule.program(comm.rank)
        final = max(at for at, action in enumerate(program) if action.kind != "F")
        self._reduce_gradients(False)
        for at, action in enumerate(program):
            if at == final:
                self._reduce_gradients(True)
            run.take(action)
        messages.end()
        self._add_tied(earlier)
        comm.broadcast(run.total, schedule.rank_of(schedule.num_stages - 1))
        return run.total

    def _reduce_gradients(self, reduces: bool) -> None:
        """Whether the next backwards of a sharded model reduce gradients. Only the last one of a step does, for all of them."""
        change: Any = getattr(self.stages.model, "set_requires_gradient_sync", None)
        if change is not None:
            change(reduces)

    def _take_tied(self) -> list[torch.Tensor | None]:
        """Take the gradients that parameters on several ranks have from earlier steps: they are sums already."""
        earlier = []
        for name, _ in self._tied:
            param = self.stages.model.get_parameter(name)
            spread, part = spread_of(param), part_of(param)
            if spread is not None and (part is None or spread.everyone is not part.over):
                raise NotImplementedError(
                    f"pipeline: {name} is tied over stages on several ranks, and sharded; untie it"
                )
            earlier.append(param.grad)
            param.grad = None
        return earlier

    def _add_tied(self, earlier: Sequence[torch.Tensor | None]) -> None:
        """Add up the gradients of parameters that stages of several ranks have, and add those of earlier steps."""
        for (name, group), before in zip(self._tied, earlier, strict=True):
            param = self.stages.model.get_parameter(name)
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            group.all_reduce(grad)
            param.grad = grad if before is None else before.add_(grad)


def _tied(
    model: nn.Module, plan: StagePlan, division: Sequence[range], schedule: Schedule, comm: Communicator
) -> list[tuple[str, Communicator]]:
    """The parameters that stages of several ranks have, by name, each with the ranks that have it. Collective."""
    users: dict[int, set[int]] = {}
    for stage, names in enumerate(ModelStages.names_of(model, plan, division)):
        for param in (param for name in names for param in model.get_submodule(name).parameters()):
            users.setdefault(id(param), set()).add(schedule.rank_of(stage))
    found = []
    for name, param in model.named_parameters():
        if len(ranks := users.get(id(param), set())) > 1:
            group = comm.split(0 if comm.rank in ranks else None)
            if group is not None:
                found.append((name, group))
    return found


def _call(given: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and named arguments of the model."""
    if isinstance(given, torch.Tensor):
        return (given,), {}
    return ((), dict(given)) if isinstance(given, Mapping) else (tuple(given), {})


def _shape(call: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[int, ...]:
    """The shape of the first tensor of a call."""
    args, kwargs = call
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return tuple(value.shape)
    raise ValueError("step: the inputs of a micro-batch contain no tensor")


def _itself(output: Any, micro: int) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.loss


def _same(loss: torch.Tensor) -> torch.Tensor:
    return loss
