"""Schedules of a pipeline as plain data. `check` proves them, `timeline` computes when each action runs."""

from collections.abc import Callable, Mapping

from mpitrain.stages.schedules.interleaved import interleaved
from mpitrain.stages.schedules.one_stage import gpipe, one_f_one_b, zero_bubble_h1
from mpitrain.stages.schedules.schedule import Action, Schedule, StageTimes, Times
from mpitrain.stages.schedules.vee import dual_pipe_v, zero_bubble_v

__all__ = ["SCHEDULES", "Action", "Schedule", "StageTimes", "Times", "make_schedule"]

SCHEDULES: Mapping[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zero_bubble_h1,
    "zb-v": zero_bubble_v,
    "dualpipe-v": dual_pipe_v,
}
"""By name: each takes the number of ranks and of micro-batches; "interleaved" also the stages of a rank."""


def make_schedule(name: str, num_ranks: int, num_micro: int, stages_per_rank: int | None = None) -> Schedule:
    """The schedule of this name. `stages_per_rank`: of "interleaved" (None: 2); others have their own number.

    ValueError for an unknown name, or for numbers for which the schedule is not defined.
    """
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}; expected one of {', '.join(SCHEDULES)}")
    if num_micro < 1:
        raise ValueError(f"expected at least 1 micro-batch, got {num_micro}")
    if name != "interleaved":
        made = SCHEDULES[name](num_ranks, num_micro)
        if stages_per_rank not in (None, made.stages_per_rank):
            raise ValueError(f"{name} has {made.stages_per_rank} stages on each rank, got {stages_per_rank}")
        return made
    if (count := 2 if stages_per_rank is None else stages_per_rank) < 2:
        raise ValueError(f"interleaved needs at least 2 stages on each rank, got {count}")
    return SCHEDULES[name](num_ranks, num_micro, count)
