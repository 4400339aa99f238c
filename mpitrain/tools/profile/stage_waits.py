"""How long the ranks of a pipeline wait for each other, from the timeline of its last steps. Pure: no torch."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from mpitrain.stages.records import Measured


class StageWaits(NamedTuple):
    """Of one pipeline. The number of a rank is that in the pipeline."""

    ranks: Sequence[dict[tuple[int, str], float]]
    """For each rank the mean seconds of a step between its actions, most of which are waits: by the rank for which, and for what."""
    idle: float
    """The share of the time that the schedule leaves empty, with stages of unequal length."""
    messages: float
    """The share in which a result was computed already, and had not come."""
    schedule: str
    num_micro: int

    @classmethod
    def of(cls, measured: Measured) -> "StageWaits":
        """From the measured timeline."""
        schedule, idle = measured.schedule, measured.idle()
        ranks: list[dict[tuple[int, str], float]] = [defaultdict(float) for _ in range(schedule.num_ranks)]
        for step in measured.steps:
            for rank, program in enumerate(step.programs):
                befores = [0.0, *step.ended[rank]]
                for action, before, begun in zip(program, befores, step.begun[rank], strict=False):
                    needed = ((schedule.rank_of(each.stage), each.kind) for each in schedule.needed(action))
                    for source, kind in sorted(each for each in needed if each[0] != rank)[:1]:
                        what = "activations" if kind == "F" else "gradients"
                        ranks[rank][source, what] += (begun - before) / len(measured.steps)
        return cls([dict(each) for each in ranks], idle.schedule, idle.messages, schedule.name, schedule.num_micro)
