"""The price of a step: seconds by cause and bytes by link, for a model on a machine in a layout."""

import math
from functools import lru_cache
from typing import NamedTuple

from mpitrain.plan.block import block_of, head_s
from mpitrain.plan.layout import Layout, Software
from mpitrain.plan.links import Sent, gather, group, message, reduce
from mpitrain.plan.machine import Machine
from mpitrain.plan.transformer import Transformer
from mpitrain.stages.schedules import SCHEDULES, Schedule, Times

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
}
"""Where the time of a step goes."""

OPTIMIZER_BYTES = {2: 30, 4: 28}
"""Bytes that AdamW reads and writes for a parameter, by the bytes of a number in forward and backward: gradient, parameter in fp32 and
two moments, read; the last three and the parameter for the forward, written."""


class Price(NamedTuple):
    """Of one step."""

    seconds: dict[str, float]
    """By cause, see `CAUSES`."""
    sent: dict[str, Sent]
    """What one rank sends, by its purpose: tensor, context, experts, pipeline, gradients, gathers. All of it, hidden or not."""

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())


def price(model: Transformer, machine: Machine, software: Software, layout: Layout) -> Price:
    """The price of a step. ValueError for a schedule that is not defined for these numbers."""
    made, (head_forward, head_backward) = block_of(model, machine, software, layout), _head(model, machine, layout)
    n, p = layout.num_micro, layout.pipeline
    one = made.forward + made.backward
    blocks, has_head = busiest_stage(
        model.layers,
        p,
        layout.stages_per_rank,
        (head_forward + head_backward) / (one + made.again),
        software.balances_stages,
    )
    seconds = dict.fromkeys(CAUSES, 0.0)
    seconds["compute"] = n * (blocks * one + has_head * (head_forward + head_backward))
    seconds["again"] = n * blocks * made.again
    repeats = 2 if layout.recompute == "block" else 1  # forwards of which the messages are sent
    sent = {
        "tensor": made.tensor.times(n * blocks * (1 + repeats)),
        "context": made.context.times(n * blocks * (2 + repeats)),
        "experts": made.experts.times(n * blocks * (1 + repeats)),
    }
    # Communication that is repeated is in "again".
    seconds["tensor"] = 2 * n * blocks * made.tensor.seconds
    seconds["context"] = 3 * n * blocks * made.context.seconds
    seconds["experts"] = 2 * n * blocks * made.experts.seconds
    backward = blocks * (made.backward + made.again + made.sent_backward) + has_head * head_backward
    if p > 1:
        times = stage_times(model, machine, software, layout)
        seconds["bubble"] = _idle(layout, times)
        sent["pipeline"] = _message(model, machine, software, layout).times(2 * n * layout.stages_per_rank)
        # The first micro-batch passes all stages, and its gradient comes back: nothing can be computed then.
        exposed = 0.0 if software.overlaps_messages else sent["pipeline"].seconds
        seconds["messages"] = exposed + 2 * (p - 1) * times.message
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
    parameters = rank_parameters(model, layout)
    spread = layout.shards if layout.zero else 1
    stream = machine.memory_bandwidth * machine.efficiency.stream
    seconds["optimizer"] = parameters / spread * OPTIMIZER_BYTES[machine.element_bytes] / stream
    return Price(seconds, sent)


def _head(model: Transformer, machine: Machine, layout: Layout) -> tuple[float, float]:
    return head_s(model, machine, layout.tensor, layout.context, layout.micro)


@lru_cache(maxsize=65536)
def busiest_stage(layers: int, ranks: int, stages_per_rank: int, head: float, is_balanced: bool) -> tuple[int, bool]:
    """The number of blocks of the busiest rank of a pipeline, and whether it also has the head.

    `head`: the cost of the head, in blocks. `is_balanced`: it counts when blocks are dealt to stages; else all stages have as many. All
    stages of a rank count as much as the largest one, because the other ranks wait for it.
    """
    if ranks == 1:
        return layers, True
    stages = ranks * stages_per_rank
    most = math.ceil(layers / stages)  # blocks of a stage
    if not is_balanced:
        return most * stages_per_rank, True
    pace, found = math.inf, (layers, True)
    while most < pace:
        last = max(0, layers - (stages - 1) * most)  # blocks of the stage with the head
        if (slowest := max(most, last + head)) < pace:
            pace = slowest
            found = (most * stages_per_rank, False) if slowest == most else (most * (stages_per_rank - 1) + last, True)
        most += 1
    return found


def stage_times(model: Transformer, machine: Machine, software: Software, layout: Layout) -> Times:
    """Seconds of a rank in the middle of a pipeline for one micro-batch, and of one message."""
    made, blocks = block_of(model, machine, software, layout), model.layers / layout.pipeline
    return Times(
        blocks * (made.forward + made.sent_forward),
        blocks * (made.backward - made.weights + made.again + made.sent_backward),
        blocks * made.weights,
        _message(model, machine, software, layout).seconds if layout.pipeline > 1 else 0.0,
    )


def _idle(layout: Layout, times: Times) -> float:
    """Seconds in which the busiest rank waits for others, without the time of messages."""
    idle = scheduled(layout.schedule, layout.pipeline, layout.num_micro, layout.stages_per_rank).idle(times)
    # The formulae hold for weights <= forward <= input gradients, and the times of a block are in this order.
    assert idle is not None, (layout, times)
    return idle


@lru_cache(maxsize=65536)
def scheduled(name: str, ranks: int, num_micro: int, stages_per_rank: int) -> Schedule:
    """A schedule of a pipeline; ValueError where it is not defined."""
    return SCHEDULES[name](ranks, num_micro, *([stages_per_rank] if name == "interleaved" else []))


def _message(model: Transformer, machine: Machine, software: Software, layout: Layout) -> Sent:
    """The activations of a micro-batch, from one rank to the next stage."""
    nbytes = layout.micro * model.context / layout.context * model.width * machine.element_bytes
    within_node = layout.ranks <= machine.ranks_per_node
    is_part = layout.sequence or software.sends_parts
    sent = message(machine, nbytes / layout.tensor if is_part else nbytes, within_node=within_node)
    if is_part and not layout.sequence:
        sent = sent.plus(gather(machine, nbytes, group(machine, layout.tensor, 1)))
    return sent


def rank_parameters(model: Transformer, layout: Layout) -> float:
    """Parameters of the rank of a pipeline that has most, before ZeRO spreads them: one of the first or last stage."""
    t, p = layout.tensor, layout.pipeline
    mlp = model.experts * model.expert_matrices / layout.experts
    router = model.experts * model.width if model.experts > 1 else 0
    of_block = (model.attention_matrices + mlp) / t + router + model.vectors
    embeddings = model.vocab * model.width / t * (2 if p == 1 and not model.tied else 1)
    return math.ceil(model.layers / p) * of_block + embeddings + model.positions * model.width


def _reductions(model: Transformer, machine: Machine, software: Software, layout: Layout) -> tuple[Sent, int]:
    """The reductions of gradients of a step, and how often each gradient is reduced."""
    joins, ranks = software.joins_adapters, layout.data * layout.context
    nbytes = rank_parameters(model, layout) * software.grad_bytes
    if layout.zero == 0:
        sent = reduce(machine, nbytes, group(machine, ranks, layout.tensor), joins_adapters=joins)
    else:
        sent = gather(machine, nbytes, group(machine, layout.shards, layout.tensor), joins_adapters=joins)
        copies = group(machine, layout.copies, layout.tensor * layout.shards)
        sent = sent.plus(reduce(machine, nbytes / layout.shards, copies, joins_adapters=joins))
    count = layout.num_micro if software.reduces_each_micro_batch and layout.pipeline == 1 else 1
    return sent.times(count), count


def _gathers(model: Transformer, machine: Machine, software: Software, layout: Layout) -> tuple[Sent, int]:
    """The gathers of parameters of a step, and how often each parameter is gathered.

    Once after the optimizer's step, if ranks keep full parameters; else before each forward and each backward.
    """
    nbytes = rank_parameters(model, layout) * machine.element_bytes
    ranks = group(machine, layout.shards, layout.tensor)
    sent = gather(machine, nbytes, ranks, joins_adapters=software.joins_adapters, is_shared=layout.resident)
    count = 2 * layout.num_micro if layout.zero == 3 and not layout.resident else 1
    return sent.times(count), count
