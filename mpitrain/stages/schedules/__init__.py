"""Schedules of a pipeline as plain data. `check` proves them, `timeline` computes when each action runs."""

from collections.abc import Callable, Mapping

from mpitrain.stages.schedules.interleaved import interleaved
from mpitrain.stages.schedules.one_stage import gpipe, one_f_one_b, zero_bubble_h1
from mpitrain.stages.schedules.schedule import Action, Schedule, StageTimes, Times
from mpitrain.stages.schedules.vee import dual_pipe_v, zero_bubble_v

__all__ = ["SCHEDULES", "Action", "Schedule", "StageTimes", "Times"]

SCHEDULES: Mapping[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zero_bubble_h1,
    "zb-v": zero_bubble_v,
    "dualpipe-v": dual_pipe_v,
}
"""By name: each takes the number of ranks and of micro-batches; "interleaved" also the stages of a rank."""
