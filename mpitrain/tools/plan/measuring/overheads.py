"""What the trainer's steps take in addition to the work of kernels and links: steps of a GPT so small that little else is left.

The time of each step beyond its price is fitted to step + micro-batches x (micro-batch + blocks x block), with three unknown times.
"""

from collections.abc import Mapping
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from collectives.bench.kit.turns import slowest, take_turns
from mpitrain.job.record.machine.constants import Overhead
from mpitrain.job.record.machine.machine import Machine
from mpitrain.tools.plan.layout import MPITRAIN, RankLayout
from mpitrain.tools.plan.measuring.constants import MeasuredConstant
from mpitrain.tools.plan.measuring.rig import Rig, take_turns_within
from mpitrain.tools.plan.measuring.small_gpt import GptSize, config_of
from mpitrain.tools.plan.measuring.steps import WARM_UP, TrainedSteps
from mpitrain.tools.plan.price import price

HEAD, CONTEXT = 8, 8
MOST = 8
"""Ranks of tensor parallelism, at most."""
AGAIN = "again"
"""Data parallelism with blocks that are computed again."""


_HOW = {
    "data": "Data parallelism, resident",
    "gathered": "ZeRO stage 3, private",
    "tensor": "No sequence parallelism",
    "sequence": "Sequence parallelism",
    "stages": "1F1B",
}


class RunSize(NamedTuple):
    """Of one layout: blocks of the model, and micro-batches of a step."""

    blocks: int
    num_micro: int


BASE, DEEP, MANY = RunSize(2, 2), RunSize(6, 2), RunSize(2, 6)
"""The differences between the last two and the first one are the times of blocks and of micro-batches."""


def overheads(rig: Rig, machine: Machine, until: float) -> dict[str, MeasuredConstant]:
    """The section [overheads]. Collective; until `perf_counter` is `until`. `machine`: with its kernels and links."""
    comm = rig.comm
    chosen = layouts(comm.size, comm.node.size)
    sizes, made = {}, {}
    contestants: dict[tuple[str, RunSize], TrainedSteps] = {}
    for name, layout in chosen.items():
        for run in (DEEP,) if name == AGAIN else (BASE, DEEP, MANY):
            one = layout._replace(batch=layout.data * run.num_micro)
            size = GptSize(HEAD * MOST, run.blocks, MOST, CONTEXT, one.batch)
            sizes[name, run], made[name, run] = size, one
            contestants[name, run] = TrainedSteps(config_of(size, one, machine), comm, rig.device)
    take_turns(contestants, rounds=WARM_UP)
    series = slowest(comm, take_turns_within(comm, contestants, until))
    more = {
        key: float(np.median(series[key, "step"])) - price(sizes[key].transformer, machine, MPITRAIN, made[key]).step_s
        for key in contestants
    }
    return constants(more, chosen)


def layouts(ranks: int, ranks_per_node: int) -> dict[str, RankLayout]:
    """By the name of the constant: those that these ranks can run."""
    data = RankLayout(data=ranks, zero=1, resident=True)
    made = {"data": data, "gathered": RankLayout(data=ranks, zero=3), AGAIN: data._replace(recompute="block")}
    powers = (1 << n for n in range(1, MOST.bit_length()))
    if degrees := [*takewhile(lambda degree: ranks_per_node % degree == 0, powers)]:
        tensor = RankLayout(tensor=degrees[-1], data=ranks // degrees[-1])
        made |= {"tensor": tensor._replace(sequence=False), "sequence": tensor}
    if ranks % 2 == 0:
        made["stages"] = RankLayout(pipeline=2, data=ranks // 2)
    return made


def constants(
    more: Mapping[tuple[str, RunSize], float], chosen: Mapping[str, RankLayout]
) -> dict[str, MeasuredConstant]:
    """The constants from the seconds of each step beyond its price."""
    found: dict[str, MeasuredConstant] = {}
    for name, layout in chosen.items():
        if name != AGAIN:
            value = fitted({run: more[name, run] for run in (BASE, DEEP, MANY)}, layout.pipeline)
            how = f"{_HOW[name]}, {layout}: what remains of a step, of a micro-batch, and of a block in it, after their price."
            found[name] = MeasuredConstant(value, how)
    again = max(more[AGAIN, DEEP] - more["data", DEEP], 0.0) / (DEEP.blocks * DEEP.num_micro)
    found["block_again_s"] = MeasuredConstant(again, "Of a block that is computed again in the backward.")
    return found


def fitted(more: Mapping[RunSize, float], stages: int) -> Overhead:
    """Seconds of a step, a micro-batch and a block, each at least 0. A pipeline has each micro-batch on a part of the blocks, and
    `stages` - 1 of them more, in which it fills and drains."""
    waits = stages - 1
    block = (more[DEEP] - more[BASE]) / ((BASE.num_micro + waits) * (DEEP.blocks - BASE.blocks) / stages)
    both = (more[MANY] - more[BASE]) / (MANY.num_micro - BASE.num_micro)  # a micro-batch with its blocks
    block = max(block, 0.0)
    micro = max(both - block * BASE.blocks / stages, 0.0)
    step = max(more[BASE] - (BASE.num_micro + waits) * (micro + block * BASE.blocks / stages), 0.0)
    return step, micro, block
