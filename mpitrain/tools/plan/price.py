"""The price of a step: seconds by cause and bytes by link, for a model on a machine in a layout."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from mpitrain.job.record.machine.machine import Machine
from mpitrain.stages.schedules import Schedule, StageTimes, Times
from mpitrain.stages.schedules.schedule import Kind
from mpitrain.stages.schedules.timeline import timeline
from mpitrain.tools.plan.block import block_of, head_s
from mpitrain.tools.plan.kernels import kernels_of
from mpitrain.tools.plan.layout import RankLayout, Software, rank_blocks, rank_parameters, scheduled, stage_blocks
from mpitrain.tools.plan.links import Sent, gather, group, message, reduce, scatter
from mpitrain.tools.plan.overhead import again_overhead_s, overhead_of
from mpitrain.tools.plan.transformer import Transformer

CAUSES = {
    "compute": "forward and backward of the busiest stage",
    "again": "activations that are computed again",
    "tensor": "exchanges between tensor-parallel ranks",
    "context": "keys and values of other ranks",
    "experts": "tokens to and from experts",
    "bubble": "waiting for other stages of the pipeline",
    "messages": "messages between stages that nothing hides",
    "gradients": "reductions of gradients that nothing hides",
    "gathers": "gathers of parameters that nothing hides",
    "optimizer": "the optimizer's step",
    "overhead": "Python, and ranks that wait for each other at exchanges",
}
"""Where the time of a step goes."""


class Price(NamedTuple):
    """Of one step."""

    seconds: dict[str, float]
    """By cause, see `CAUSES`."""
    sent: dict[str, Sent]
    """What one rank sends, by its purpose: tensor, context, experts, pipeline, gradients, gathers. All of it, hidden or not."""

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())


def price(model: Transformer, machine: Machine, software: Software, layout: RankLayout) -> Price:
    """The price of a step. ValueError for a schedule that is not defined for these numbers."""
    made, (head_forward, head_backward) = block_of(model, machine, software, layout), _head(model, machine, layout)
    n, p = layout.num_micro, layout.pipeline
    one = made.forward + made.backward
    of_ranks = rank_blocks(model, software, layout)
    blocks, has_head, most = model.layers, True, max(of_ranks)
    if p > 1:
        cost = one + made.again + made.sent_forward + made.sent_backward
        head = (head_forward + head_backward) / cost
        blocks, has_head = busiest_stage(stage_blocks(model, software, layout), layout.stages_per_rank, head)
    seconds = dict.fromkeys(CAUSES, 0.0)
    seconds["compute"] = n * (blocks * one + has_head * (head_forward + head_backward))
    seconds["again"] = n * blocks * made.again
    repeats = 2 if layout.recompute == "block" else 1  # forwards of which the messages are sent
    sent = {
        "tensor": made.tensor.times(n * most * (1 + repeats)),
        "context": made.context.times(n * most * (2 + repeats)),
        "experts": made.experts.times(n * most * (1 + repeats)),
    }
    # Communication that is repeated is in "again". The embedding and the head together exchange half as much as a block. The shares of
    # the limits were fitted without these exchanges.
    ends = 0.5 if machine.links is not None else 0.0
    seconds["tensor"] = 2 * n * (blocks + ends) * made.tensor.seconds
    seconds["context"] = 3 * n * blocks * made.context.seconds
    seconds["experts"] = 2 * n * blocks * made.experts.seconds
    backward = blocks * (made.backward + made.again + made.sent_backward) + has_head * head_backward
    if p > 1:
        sent["pipeline"] = _message(model, machine, software, layout).times(2 * n * layout.stages_per_rank)
        seconds["bubble"], seconds["messages"] = _waits(model, machine, software, layout, sent["pipeline"].seconds)
    if layout.data * layout.context > 1:
        first = 1 / max(blocks, 1)  # what belongs to one block begins or ends alone
        reductions, count = _reductions(model, machine, software, layout)
        beside = 0.0  # seconds in which reductions and computation both run
        if software.overlaps(layout) and layout.zero != 1:
            beside = min(reductions.seconds * (1 - first / count), count * backward * (1 - first))
        sent["gradients"] = reductions
        seconds["gradients"] = reductions.seconds - machine.efficiency.overlap * beside
        if layout.zero:
            gathers, count = _gathers(model, machine, software, layout)
            work = sum(seconds[cause] for cause in ("compute", "again", "tensor", "context", "experts"))
            gathers_beside = 0.0
            if count > 1 and software.overlaps_gathers:
                # Reductions take a part of the time that can hide gathers.
                gathers_beside = max(0.0, min(gathers.seconds * (1 - first / count), work * (1 - first) - beside))
            sent["gathers"] = gathers
            seconds["gathers"] = gathers.seconds - machine.efficiency.overlap * gathers_beside
    seconds["gradients"] += _other_gradients(model, machine, software, layout)
    kernels = kernels_of(machine, is_cut=layout.is_cut)
    of_step, of_micro, of_block = overhead_of(machine, layout)
    of_blocks = blocks * (of_block + again_overhead_s(machine, layout))
    seconds["overhead"] = of_step + n * (layout.stages_per_rank * of_micro + of_blocks)
    seconds["optimizer"] = kernels.optimizer(rank_parameters(model, software, layout).own(layout))
    return Price(seconds, sent)


def _head(model: Transformer, machine: Machine, layout: RankLayout) -> tuple[float, float]:
    return head_s(model, machine, layout.tensor, layout.context, layout.micro, layout.is_cut)


def busiest_stage(blocks: Sequence[int], stages_per_rank: int, head: float) -> tuple[int, bool]:
    """The number of blocks of the busiest rank of a pipeline, and whether it also has the head.

    `blocks`: of each stage. `head`: the cost of the head, in blocks. All stages of a rank count as much as the largest one, because
    the other ranks wait for it.
    """
    most, last = max(blocks), blocks[-1]
    if most > last + head:
        return most * stages_per_rank, False
    return most * (stages_per_rank - 1) + last, True


def stage_times(model: Transformer, machine: Machine, software: Software, layout: RankLayout) -> tuple[Times, ...]:
    """Seconds of each stage for one micro-batch, and of one message. Blocks are dealt to stages as the program does."""
    of_head = _head(model, machine, layout)
    times = [_times(model, machine, software, layout, own) for own in stage_blocks(model, software, layout)]
    last = times[-1]
    half = of_head[1] / 2  # of the head's backward: a product for the input, and one for the weights
    times[-1] = last._replace(
        forward=last.forward + of_head[0],
        input_grads=last.input_grads + half,
        weight_grads=last.weight_grads + half,
    )
    return tuple(times)


def _times(
    model: Transformer, machine: Machine, software: Software, layout: RankLayout, blocks: float, *, stages: int = 1
) -> Times:
    """Seconds of `blocks` blocks for one micro-batch, and of one message. `stages`: those that have the blocks."""
    made = block_of(model, machine, software, layout)
    _, of_micro, of_block = overhead_of(machine, layout)
    overhead = (stages * of_micro + blocks * of_block) / 2  # of a forward, and of a backward
    again = made.again + again_overhead_s(machine, layout)
    return Times(
        blocks * (made.forward + made.sent_forward) + overhead,
        blocks * (made.backward - made.weights + again + made.sent_backward) + overhead,
        blocks * made.weights,
        _message(model, machine, software, layout).seconds if layout.pipeline > 1 else 0.0,
    )


_MOST_ACTIONS = 128
"""Of a pipeline, whose timeline is computed on a measured machine. Larger ones take too long for a search."""


def _waits(
    model: Transformer, machine: Machine, software: Software, layout: RankLayout, sent_s: float
) -> tuple[float, float]:
    """Seconds in which the busiest rank waits for other stages, and those that messages add. `sent_s`: of all messages of a rank."""
    schedule = scheduled(layout.schedule, layout.pipeline, layout.num_micro, layout.stages_per_rank)
    if machine.kernels is not None and 3 * schedule.num_stages * schedule.num_micro <= _MOST_ACTIONS:
        times = stage_times(model, machine, software, layout)
        works = [0.0] * schedule.num_ranks
        for stage, of_stage in enumerate(times):
            works[schedule.rank_of(stage)] += schedule.num_micro * of_stage.work
        alone = _total(schedule, times, 0.0)
        return alone - max(works), _total(schedule, times, times[0].message) - alone
    middle = _times(model, machine, software, layout, model.layers / layout.pipeline, stages=layout.stages_per_rank)
    idle = schedule.idle(middle)
    if (
        idle is None
    ):  # the formulae hold for weights <= forward <= input gradients, and measured times may be in another order
        idle = timeline(schedule, middle._replace(message=0.0)).total - schedule.num_micro * middle.work
    # The first micro-batch passes all stages, and its gradient comes back: nothing can be computed then.
    exposed = 0.0 if software.overlaps_messages else sent_s
    return idle, exposed + 2 * (layout.pipeline - 1) * middle.message


def _total(schedule: Schedule, times: tuple[Times, ...], message: float) -> float:
    """Seconds of a step's actions, if each stage has its own times."""
    kinds: tuple[Kind, ...] = ("F", "B", "I", "W")
    return timeline(
        schedule, StageTimes(tuple({kind: of.of(kind, 1) for kind in kinds} for of in times), message)
    ).total


def _message(model: Transformer, machine: Machine, software: Software, layout: RankLayout) -> Sent:
    """The activations of a micro-batch, from one rank to the next stage."""
    nbytes = layout.micro * model.context / layout.context * model.width * machine.element_bytes
    within_node = layout.ranks <= machine.ranks_per_node
    is_part = layout.sequence or software.sends_parts
    sent = message(machine, nbytes / layout.tensor if is_part else nbytes, within_node=within_node)
    if is_part and not layout.sequence:
        sent = sent.plus(gather(machine, nbytes, group(machine, layout.tensor, 1)))
    return sent


def _reductions(model: Transformer, machine: Machine, software: Software, layout: RankLayout) -> tuple[Sent, int]:
    """The reductions of gradients of a step, and how often each gradient is reduced."""
    params, joins, parts = rank_parameters(model, software, layout), software.joins_adapters, _units(model, layout)
    sent = Sent()
    for number, experts, shards in (
        (params.dense, 1, layout.shards),
        (params.experts, layout.experts, layout.expert_shards),
    ):
        nbytes, ranks, stride = (
            number * software.grad_bytes,
            layout.data * layout.context // experts,
            layout.tensor * experts,
        )
        if not nbytes:
            continue
        if layout.zero == 0:
            sent = sent.plus(reduce(machine, nbytes, group(machine, ranks, stride), joins_adapters=joins, parts=parts))
            continue
        sent = sent.plus(scatter(machine, nbytes, group(machine, shards, stride), joins_adapters=joins, parts=parts))
        copies = group(machine, ranks // shards, stride * shards)
        sent = sent.plus(reduce(machine, nbytes / shards, copies, joins_adapters=joins, parts=parts))
    count = layout.num_micro if software.reduces_each_micro_batch and layout.pipeline == 1 else 1
    return sent.times(count), count


def _other_gradients(model: Transformer, machine: Machine, software: Software, layout: RankLayout) -> float:
    """Seconds of moving gradients into the memory of reductions, and of adding those of several micro-batches."""
    params, n = rank_parameters(model, software, layout), layout.num_micro
    full, own = params.all, params.own(layout)
    count = n if software.reduces_each_micro_batch and layout.pipeline == 1 else 1  # reductions
    moves = count if layout.data * layout.context > 1 else 0
    # Stages of a pipeline add products of weights in place. Without ZeRO the reduced gradients are copied once more.
    adds = n - 1 if layout.pipeline == 1 else 0
    if moves and not layout.zero:
        moves += 1
    return kernels_of(machine, is_cut=layout.is_cut).gradients(full, own, moves=moves, adds=adds)


def _gathers(model: Transformer, machine: Machine, software: Software, layout: RankLayout) -> tuple[Sent, int]:
    """The gathers of parameters of a step, and how often each parameter is gathered.

    Before each forward and each backward in stage 3, unless ranks keep full parameters; else before each forward, or once a step.
    """
    params = rank_parameters(model, software, layout)
    sent = Sent()
    for number, experts, shards in (
        (params.dense, 1, layout.shards),
        (params.experts, layout.experts, layout.expert_shards),
    ):
        ranks = group(machine, shards, layout.tensor * experts)
        nbytes, joins, parts = number * machine.element_bytes, software.joins_adapters, _units(model, layout)
        if nbytes:
            sent = sent.plus(
                gather(machine, nbytes, ranks, joins_adapters=joins, is_shared=layout.resident, parts=parts)
            )
    count = layout.num_micro if software.gathers_each_forward else 1
    if layout.zero == 3 and not layout.resident:
        count = 2 * layout.num_micro
    return sent.times(count), count


def _units(model: Transformer, layout: RankLayout) -> int:
    """Parts in which a rank's parameters are gathered and their gradients reduced: blocks."""
    return max(1, math.ceil(model.layers / layout.pipeline))
