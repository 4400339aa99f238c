"""`pipeline`: a plain model, divided into stages over ranks, in place."""

import inspect
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from os import PathLike
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

from collectives import Communicator
from collectives.diagnosis import stacks
from collectives.transports.node.noted_room import note_room
from mpitrain.optim.optimizer_checks import watch_optimizers
from mpitrain.optim.torch_calls import watch_norms
from mpitrain.placement import parts
from mpitrain.placement.agreement import check_alike
from mpitrain.placement.marks import spread_of
from mpitrain.plans.stage_plan import StagePlan
from mpitrain.plans.transformers_plan import stage_plan_of_transformers
from mpitrain.stages.division import costs_of
from mpitrain.stages.executor import PipelineRun
from mpitrain.stages.inputs import Inputs, call_of, check_inputs, described
from mpitrain.stages.linear import take_linear_layers, take_torch_products
from mpitrain.stages.messages import Messages, Streams
from mpitrain.stages.model_stages import ModelStages
from mpitrain.stages.places import in_program, of_message
from mpitrain.stages.records import Measured, Record, gathered
from mpitrain.stages.schedules import Action, Schedule, StageTimes, make_schedule
from mpitrain.stages.schedules.dividing import divide
from mpitrain.stages.schedules.forwards import forwards
from mpitrain.stages.tied import mark, stages_of_params
from mpitrain.torch_glue.heap import keep_freed_memory

# Stacks in the reports of errors and of long waits tell the place in the pipeline.
stacks.pass_over("torch", "mpitrain.stages")
stacks.name(PipelineRun.take, lambda local: in_program(local["self"].program, local["at"]))
stacks.name(Messages.receive, of_message)
stacks.name(
    Messages.end, lambda local: "the end of a step of a pipeline, which waits until the other ranks have its messages"
)

_NUM_RECORDS = 8


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

    Args:
        model: a model without stages, cut by `tensor_parallel` or not.
        comm: the ranks of the pipeline, such as `mesh["pp"]`.
        schedule: a name of `mpitrain.stages.schedules.SCHEDULES`.
        micro_batches: the number of forwards of a step.
        stages_per_rank: of "interleaved", 2 or more (default: 2).
        plan: the parts of the model; None: the model's attribute `stage_plan`, or the plan of a transformers model.
        division: the number of blocks of each stage; None: stages of about equal cost, with the embedding and the head counted.

    Raises ValueError on all ranks, with the model unchanged, for a schedule, plan or division that does not fit the model or the ranks.
    """
    with comm.together("pipeline"):
        if parts.stages_of(model.parameters()) is not None:
            raise ValueError("the model is in stages already; build it again for another pipeline")
        if any(spread_of(param) is not None and parts.part_of(param) is None for param in model.parameters()):
            raise ValueError("the model is sharded already; call pipeline before fully_shard")
        made = make_schedule(schedule, comm.size, micro_batches, stages_per_rank)
        plan = plan or getattr(model, "stage_plan", None) or stage_plan_of_transformers(model)
        if plan is None:
            raise ValueError(
                f"{type(model).__name__} brings no plan along (an attribute stage_plan); pass plan=, a mpitrain.stages.StagePlan"
            )
        _check_plan(model, plan)
        divided = _division(model, plan, division, made.num_stages)
        _check_params(ModelStages.names_of(model, plan, divided), model, made)
    note_room(comm)  # before one of these ranks goes on to shard its stages
    described = [f"{name} of shape {tuple(param.shape)}" for name, param in model.named_parameters()]
    check_alike(
        comm,
        [f"schedule {made.name}, {micro_batches} micro-batches", f"stages {divided}", *described],
        caller="pipeline",
        remedy="build the same model on all ranks, and divide it alike",
    )
    return Pipeline(model, comm, made, plan, divided)


def _check_plan(model: nn.Module, plan: StagePlan) -> None:
    """ValueError for a forward that cannot take a stream, and for blocks that are used twice."""
    params = inspect.signature(model.forward).parameters.values()
    if not any(param.name == plan.stream or param.kind is param.VAR_KEYWORD for param in params):
        raise ValueError(
            f"the plan's stream is {plan.stream!r}, which is no argument of {type(model).__name__}.forward; expected the argument by "
            "which it takes the output of an earlier stage in place of its input"
        )
    blocks = list(model.get_submodule(plan.blocks)._modules.values())
    if len(set(map(id, blocks))) < len(blocks):
        raise ValueError(f"{plan.blocks} has a block twice; a pipeline cannot divide blocks that share all weights")


def _check_params(names_of_stages: Sequence[Sequence[str]], model: nn.Module, schedule: Schedule) -> None:
    """ValueError for a rank without parameters."""
    has = {
        schedule.rank_of(stage)
        for stage, names in enumerate(names_of_stages)
        if any(True for name in names for _ in model.get_submodule(name).parameters())
    }
    if lacking := set(range(schedule.num_ranks)) - has:
        raise ValueError(
            f"rank {min(lacking)} of the pipeline would have no parameters; expected another division, or fewer ranks"
        )


def _division(model: nn.Module, plan: StagePlan, counts: Sequence[int] | None, num_stages: int) -> list[range]:
    before, blocks, after = costs_of(model, plan)
    if counts is None:
        return divide(before, blocks, after, num_stages)
    if len(counts) != num_stages or sum(counts) != len(blocks) or min(counts) < 0 or (num_stages > 1 and not counts[0]):
        raise ValueError(
            f"expected the numbers of blocks of {num_stages} stages, {len(blocks)} together and not 0 in the first, got "
            f"{list(counts)}"
        )
    ends = [sum(counts[:stage]) for stage in range(num_stages + 1)]
    return [range(begin, end) for begin, end in pairwise(ends)]


class Pipeline:
    """The stages of a model on this rank, and the schedule that runs them."""

    def __init__(
        self, model: nn.Module, comm: Communicator, schedule: Schedule, plan: StagePlan, division: Sequence[range]
    ) -> None:
        self.comm, self.schedule, self.division = comm, schedule, division
        watch_optimizers()
        watch_norms()
        mine = [stage for stage in range(schedule.num_stages) if schedule.rank_of(stage) == comm.rank]
        before = dict(model.named_parameters())
        stages = stages_of_params(model, ModelStages.names_of(model, plan, division))
        self.stages = ModelStages(model, plan, division, mine)
        self._tied = mark(model, before, stages, schedule, comm)
        take_linear_layers(model)
        if any(param.device.type in ("cpu", "meta") for param in model.parameters()):
            keep_freed_memory()
        # With gradients, and without: with sequence parallelism the shapes differ, see stage_streams.py.
        self._streams: dict[bool, Streams] = {True: {}, False: {}}
        self._records: deque[Record] = deque(maxlen=_NUM_RECORDS)
        self._has_warmed_up = False
        self.communication_s = 0.0
        """Seconds that this rank has waited for results of other stages so far, in steps and evaluations."""
        self.around: Callable[[Action], AbstractContextManager[Any]] = lambda action: nullcontext()
        """Makes a context that is open while an action computes: for profiles."""

    def step(
        self,
        inputs: Sequence[Inputs],
        loss_of: Callable[[Any, int], torch.Tensor] | None = None,
        *,
        last: Sequence[Mapping[str, Any]] | None = None,
        scale: Callable[[torch.Tensor], torch.Tensor] | None = None,
        seeds: Sequence[Sequence[int]] | None = None,
    ) -> torch.Tensor:
        """Forwards and backwards of all micro-batches; the gradients are added to those of the parameters. Collective.

        Args:
            inputs: for each micro-batch the arguments of the model: a tensor, a sequence or a mapping. The first stage gets all of
                them, the others the named ones but the plan's `input`. The micro-batches may have different sizes.
            loss_of: loss_of(output, micro) is the loss of the model's output, on the rank of the last stage; None: the output is
                the loss.
            last: for each micro-batch, more named arguments for the last stage alone, such as the targets.
            scale: changes a loss before its backward; it is called on each rank.
            seeds: if the model has slices and draws random numbers: for each micro-batch the numbers for `seed_all` before its
                forward, the same as without a pipeline, such as (seed, step, slice).

        If the model has slices, each micro-batch is one of `mpitrain.rounds(model)`.

        Returns: the loss of each micro-batch, before `scale`: (M,) float64, the same on all ranks. ValueError on all ranks if the
        number of micro-batches is not that of the schedule, or if it does not fit the slices.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "step: gradients are disabled (torch.no_grad); evaluate computes a loss without gradients"
            )
        run = self._begin("step", self.schedule, inputs, loss_of, last, scale, seeds)
        earlier = self._tied.take(self.stages.model)
        has_slices = self._slices is not None
        if has_slices:
            run.all()
        else:
            self._run_and_reduce(run)
        began = perf_counter()
        run.end()
        self._tied.add(self.stages.model, earlier, is_lent=has_slices)
        if has_slices:
            sharded: Any = self.stages.model
            sharded.end_step_of_stages()
        self.communication_s += perf_counter() - began
        losses = self._from_last_stage(run)
        run.record.stop = perf_counter()
        self._keep(run.record)
        return losses

    def _run_and_reduce(self, run: PipelineRun) -> None:
        """Run the program, and reduce the gradients of all micro-batches together."""
        final = max(at for at, action in enumerate(run.program) if action.kind != "F")
        self._reduce_gradients(False)
        for at in range(len(run.program)):
            if at == final:
                self._reduce_gradients(True)
            run.take(at)

    @torch.no_grad()
    def evaluate(
        self,
        inputs: Sequence[Inputs],
        loss_of: Callable[[Any, int], torch.Tensor] | None = None,
        *,
        last: Sequence[Mapping[str, Any]] | None = None,
    ) -> torch.Tensor:
        """Forwards of any number of micro-batches, without gradients. Collective. Arguments as in `step`.

        Returns: the loss of each micro-batch: (M,) float64, the same on all ranks. ValueError on all ranks if they have different
        numbers of micro-batches.
        """
        run = self._begin("evaluate", forwards(self.schedule, len(inputs)), inputs, loss_of, last)
        run.all()
        run.end()
        return self._from_last_stage(run)

    @torch.no_grad()
    def next_logits(self, inputs: Inputs) -> torch.Tensor:
        """The logits for the token after the last one of each sequence, (B, 1, V), on all ranks. Collective.

        So `mpitrain.models.sample_tokens(pipe.next_logits, ...)` samples from the model. `inputs`: the arguments of the model, of which
        the tokens are the first, the same on all ranks.
        """
        found: list[torch.Tensor] = []

        def keep(output: Any, micro: int) -> torch.Tensor:
            logits_BLV = output if isinstance(output, torch.Tensor) else output.logits  # noqa: N806
            found.append(logits_BLV[:, -1:].contiguous())
            return torch.zeros(())

        run = self._begin("next_logits", forwards(self.schedule, 1), [inputs], keep)
        run.all()
        run.end()
        root = self.schedule.rank_of(self.schedule.num_stages - 1)
        shape, dtype = self.comm.broadcast_object((found[0].shape, found[0].dtype) if found else None, root)
        logits = found[0] if found else torch.empty(shape, dtype=dtype, device=self._device)
        self.comm.broadcast(logits, root)
        return logits

    def measured(self) -> Measured:
        """The times of the last steps on all ranks, at most 8, without the first step. Collective. ValueError before the first step."""
        return gathered(self.comm, self.schedule, self._records)

    def times(self) -> StageTimes:
        """The measured seconds of each kind of action by stage, and of a message: `Measured.times`. Collective."""
        return self.measured().times()

    def forward_share(self) -> float:
        """The share of forwards in the time of all actions of this rank in the last step."""
        seconds = {"F": 0.0, "other": 0.0}
        for action, begun, ended in self.actions():
            seconds["F" if action.kind == "F" else "other"] += ended - begun
        return seconds["F"] / (sum(seconds.values()) or 1.0)

    def draw(self, path: str | PathLike[str] | None) -> None:
        """Write a picture of the planned and the measured timeline to an SVG file. Collective.

        path: of rank 0 of the pipeline, which writes the file. None: no file; so in a mesh of several pipelines, one writes the file.
        """
        measured = self.measured()
        with self.comm.together("draw"):
            if self.comm.rank == 0 and path is not None:
                Path(path).write_text(measured.svg())

    def actions(self) -> list[tuple[Action, float, float]]:
        """The actions of the last step on this rank, each with its begin and end in seconds of `time.perf_counter`."""
        if not self._records:
            return []
        record, program = self._records[-1], self.schedule.program(self.comm.rank)
        return list(zip(program, record.begun, record.ended, strict=True))

    def _keep(self, record: Record) -> None:
        """Keep the record of a step. The first step takes longer, so the second one replaces it."""
        if len(self._records) == 1 and not self._has_warmed_up:
            self._records.clear()
            self._has_warmed_up = True
        self._records.append(record)

    def _begin(
        self,
        name: str,
        schedule: Schedule,
        inputs: Sequence[Inputs],
        loss_of: Callable[[Any, int], torch.Tensor] | None = None,
        last: Sequence[Mapping[str, Any]] | None = None,
        scale: Callable[[torch.Tensor], torch.Tensor] | None = None,
        seeds: Sequence[Sequence[int]] | None = None,
    ) -> PipelineRun:
        """Check the arguments of all ranks, and agree on the shapes of the micro-batches."""
        began = perf_counter()
        slices = self._slices
        if slices is not None:
            take_torch_products(self.stages.model)
        with self.comm.together(name):
            self._check_norms()
            if slices is not None and torch.is_grad_enabled():
                self._check_slices(slices)
            if isinstance(inputs, torch.Tensor):
                raise ValueError("expected a sequence of micro-batches, got one tensor")
            if seeds is not None and slices is None:
                raise ValueError("seeds need a model with slices; pass slices=, a power of two, to fully_shard")
            for what, given in (("inputs", inputs), ("last", last), ("seeds", seeds)):
                if given is not None and len(given) != schedule.num_micro:
                    raise ValueError(f"expected {schedule.num_micro} micro-batches, got {len(given)} ({what})")
            if not inputs:
                raise ValueError("expected at least one micro-batch, got none")
            calls = [call_of(given) for given in inputs]
            mine = [described(call) for call in calls]
        everyone = self.comm.all_gather_object(mine)
        with self.comm.together(name):
            check_inputs(everyone)
        shapes = [each.shapes for each in everyone[0]]
        messages = Messages(self.comm, schedule, self._streams[torch.is_grad_enabled()], shapes, self._device)
        program = schedule.program(self.comm.rank)
        if scale is not None and self.comm.rank != schedule.rank_of(schedule.num_stages - 1):
            scale(torch.zeros((), device=self._device))  # a scaler, such as torch's, begins with its first call
        self.communication_s += perf_counter() - began
        of_program = (self.stages, messages, program, calls, loss_of or _itself, last, scale, seeds)
        tied = self._tied.rounds(self.stages.model) if slices is not None and torch.is_grad_enabled() else None
        return PipelineRun(*of_program, waited=self._waited, around=self.around, tied=tied)

    def _waited(self, seconds: float) -> None:
        self.communication_s += seconds

    def _from_last_stage(self, run: PipelineRun) -> torch.Tensor:
        """The losses, on all ranks."""
        began = perf_counter()
        self.comm.broadcast(run.losses, self.schedule.rank_of(self.schedule.num_stages - 1))
        self.communication_s += perf_counter() - began
        return run.losses

    @property
    def _device(self) -> torch.device:
        return next(self.stages.model.parameters()).device

    def _check_norms(self) -> None:
        """ValueError if norms over all parts of the model are not possible: only `fully_shard` gets the mesh with both axes."""
        param = next(iter(self.stages.model.parameters()))
        part, spread = parts.part_of(param), spread_of(param)
        if part is not None and part.over.size > 1 and spread is not None and spread.everyone is part.over:
            raise ValueError(
                "this model is cut by tensor_parallel and in stages, and no mesh has told it the ranks of both; call "
                "mpitrain.fully_shard(model, mesh, stage=0) after pipeline, or another stage of ZeRO"
            )

    @property
    def _slices(self) -> Any:
        """The slices of a sharded model; None without them."""
        of_step: Any = getattr(self.stages.model, "slices_of_step", None)
        return None if of_step is None else of_step()

    def _check_slices(self, slices: Any) -> None:
        """ValueError if the number of micro-batches or the tied weights do not fit the slices."""
        if self.schedule.num_micro != slices.num_rounds:
            raise ValueError(
                f"expected a pipeline of {slices.num_rounds} micro-batches, one for each of mpitrain.rounds(model) with {slices.count} "
                f"slices and {slices.num_ranks} data ranks, got {self.schedule.num_micro}"
            )
        self._tied.check_slices()

    def _reduce_gradients(self, reduces: bool) -> None:
        """Whether the next backwards of a sharded model reduce gradients. Only the last one of a step does, for all of them."""
        change: Any = getattr(self.stages.model, "set_requires_gradient_sync", None)
        if change is not None:
            change(reduces)


def _itself(output: Any, micro: int) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.loss
