"""What waits for what, in sentences. Pure: no torch, no MPI."""

from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean

import numpy as np

from collectives.diagnosis.record import shown_ranks
from mpitrain.job.record.stragglers import RankTimes, slow_on_average
from mpitrain.tools.profile.parts import LAYERS, Parts
from mpitrain.tools.profile.stage_waits import StageWaits

LEAST_SHARE = 0.03
"""Of a step. A wait that is shorter is not told."""
_WORK = ("forward", "backward", "own work")


def sentences(parts: Parts, pipelines: Sequence[StageWaits] = ()) -> list[str]:
    """What waits for what. `pipelines`: in the order of their first ranks."""
    found = [
        *_slow_ranks(parts),
        *_waits_for_ranks(parts),
        *_waits_for_stages(parts, pipelines),
        *_waits_for_data(parts),
    ]
    return found or [f"No rank waits {LEAST_SHARE:.0%} of a step or more for another one, or for data."]


def _slow_ranks(parts: Parts) -> Iterator[str]:
    """By the rule of `train`, of the mean step."""
    if not parts.cpu or not parts.delay:
        return
    work = [sum(parts.of_kind(kind)[rank] for kind in _WORK) for rank in range(parts.num_ranks)]
    spent = RankTimes(
        *map(np.array, (work, parts.of("data", "own work"), parts.cpu, parts.delay, [1.0] * parts.num_ranks))
    )
    for slow in slow_on_average(parts.stages, spent):
        yield f"Rank {slow.rank} takes {slow.factor:.2f} times as long as the other ranks: {slow.words}."


def _waits_for_ranks(parts: Parts) -> Iterator[str]:
    """The ranks of a stage meet in each communication: the one that waits least is the one for which the others wait."""
    waits = parts.of_kind("wait", [layer for layer in LAYERS if layer != "other stages"])
    for stage in sorted(set(parts.stages)):
        ranks = [rank for rank in range(parts.num_ranks) if parts.stages[rank] == stage]
        last = min(ranks, key=lambda rank: waits[rank])
        long = [rank for rank in ranks if waits[rank] >= LEAST_SHARE * parts.step_s]
        waiting = [rank for rank in long if waits[last] < 0.5 * waits[rank]]
        if waiting:
            of = _span([waits[rank] for rank in waiting], parts.step_s)
            verb = "wait" if len(waiting) > 1 else "waits"
            yield f"{_ranks(waiting)} {verb} {of} for rank {last}{_cause(parts, last, waiting)}{_place(parts, waiting)}."
        elif len(long) > 1:
            of = _span([waits[rank] for rank in long], parts.step_s)
            yield f"{_ranks(long)} wait {of} in turn for each other: other processes on their cores delay now one, now another."


def _cause(parts: Parts, last: int, waiting: Sequence[int]) -> str:
    """Which layer takes the late rank longer than the ranks that wait, if one explains a third of the wait."""
    longer: dict[str, tuple[float, float]] = {}
    for layer, name in LAYERS.items():
        row = [sum(parts.of(layer, kind)[rank] for kind in _WORK) for rank in range(parts.num_ranks)]
        usual = fmean(row[rank] for rank in waiting)
        longer[name] = row[last] - usual, row[last] / usual if usual else 0.0
    name, (seconds, factor) = max(longer.items(), key=lambda item: item[1][0])
    waits = parts.of_kind("wait")
    if seconds < (fmean(waits[rank] for rank in waiting) - waits[last]) / 3:
        return ", whose work takes as long as theirs in sum, but not at the same time"
    times = f", {factor:.1f} times as long" if 1.05 <= factor < 100 else ""
    return f", whose time in {name} is {seconds * 1e3:,.1f} ms more{times}"


def _place(parts: Parts, waiting: Sequence[int]) -> str:
    """In which layer most of the wait is, if the layers are known."""
    by_layer = {
        layer: sum(parts.of(layer, "wait")[rank] for rank in waiting)
        for layer in (*parts.blocks, *LAYERS)
        if layer not in ("blocks", "other stages", "communication")
    }
    layer, seconds = max(by_layer.items(), key=lambda item: item[1])
    share = seconds / (sum(by_layer.values()) or 1.0)
    return f"; {share:.0%} of the wait is in {LAYERS.get(layer, layer)}" if share > 0.3 else ""


def _waits_for_stages(parts: Parts, pipelines: Sequence[StageWaits]) -> Iterator[str]:
    waits = parts.of("other stages", "wait")
    for number, of in enumerate(pipelines):
        name = f" of pipeline {number}" if len(pipelines) > 1 else ""
        for stage, sources in enumerate(of.ranks):
            rank = [each for each in range(parts.num_ranks) if parts.stages[each] == stage][number]
            whole = sum(sources.values()) or 1.0
            for (source, what), seconds in sorted(sources.items(), key=lambda item: -item[1]):
                its = waits[rank] * seconds / whole
                if its >= LEAST_SHARE * parts.step_s:
                    yield f"Stage {stage}{name} (rank {rank}) waits {_span([its], parts.step_s)} for {what} of stage {source}."
        if of.idle >= LEAST_SHARE:
            yield (
                f"The ranks{name} have nothing to do for {of.idle:.0%} of the time by the schedule {of.schedule} with {of.num_micro} "
                f"micro-batches (bubble, unequal stages); messages add {of.messages:.0%}."
            )


def _waits_for_data(parts: Parts) -> Iterator[str]:
    data = parts.of("data", "own work")
    share = fmean(data) / parts.step_s
    if share >= LEAST_SHARE:
        worst = data.index(max(data))
        yield (
            f"The ranks wait {_span(data, parts.step_s)} for data, most on rank {worst}."
            if len(data) > 1
            else f"The rank waits {_span(data, parts.step_s)} for data."
        )


def _span(seconds: Iterable[float], step_s: float) -> str:
    values = sorted(seconds)
    low, high = values[0], values[-1]
    ms = f"{high * 1e3:,.1f} ms" if low > 0.9 * high else f"{low * 1e3:,.1f} to {high * 1e3:,.1f} ms"
    return f"{ms} a step ({fmean(values) / step_s:.0%})"


def _ranks(ranks: Sequence[int]) -> str:
    return shown_ranks(ranks).capitalize()
