"""When the actions of the last steps began and ended: the measured timeline, the times of each stage, and idle time by its cause."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

from collectives import Communicator
from mpitrain.stages.schedules import Schedule, StageTimes
from mpitrain.stages.schedules.drawing import svg
from mpitrain.stages.schedules.schedule import Kind
from mpitrain.stages.schedules.timeline import Timeline, timeline


@dataclass
class Record:
    """One step of one rank. Times are those of the rank's clock, in seconds.

    start: when the ranks had agreed on the step. begun, ended: of each action of the program, without its wait for a message. stop: the
    end of the step. On a GPU these are the times of the host, which only starts kernels.
    """

    start: float
    begun: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    stop: float = 0.0

    def add(self, begun: float, ended: float) -> None:
        """Note an action that has ended."""
        self.begun.append(begun)
        self.ended.append(ended)


class Idle(NamedTuple):
    """The shares of the time from one step to the next in which the ranks did not compute, by cause; means over the ranks."""

    schedule: float
    """A rank waited for a result that was not computed yet, or had nothing left to do: the bubble, also that of unequal stages."""
    messages: float
    """A rank waited for a result that was computed already, or the host did something else between two actions."""
    end: float
    """All actions had ended: the sums of gradients that several stages have, and of the loss."""
    between: float
    """Between two steps: the optimizer and the data."""

    def __str__(self) -> str:
        named = zip(("schedule", "messages", "end of the step", "between steps"), self, strict=True)
        return ", ".join(f"{name} {share:.1%}" for name, share in named)


@dataclass(frozen=True)
class Measured:
    """The last steps of a pipeline on all its ranks. In each step the times are seconds since its start."""

    schedule: Schedule
    steps: Sequence[Timeline]
    stops: Sequence[float]
    """The end of each step: of the rank that ends last."""
    between: float
    """Seconds between two steps; 0 for a single step."""

    def times(self) -> StageTimes:
        """The seconds of each kind of action by stage, and of a message: medians over the steps, of means over the micro-batches.

        A kind of action that the schedule does not have is left out. The message is the median wait for a result after its computation.
        """
        stages: list[dict[Kind, float]] = [{} for _ in range(self.schedule.num_stages)]
        of_steps: dict[tuple[int, Kind], list[float]] = {}
        waits: list[float] = []
        for step in self.steps:
            found: dict[tuple[int, Kind], list[float]] = {}
            for rank, program in enumerate(step.programs):
                for action, begun, ended in zip(program, step.begun[rank], step.ended[rank], strict=True):
                    found.setdefault((action.stage, action.kind), []).append(ended - begun)
            for key, seconds in found.items():
                of_steps.setdefault(key, []).append(fmean(seconds))
            waits += [gap.message for gap in self._gaps(step) if gap.is_message]
        for (stage, kind), seconds in of_steps.items():
            stages[stage][kind] = median(seconds)
        return StageTimes(tuple(stages), median(waits) if waits else 0.0)

    def planned(self) -> Timeline:
        """The timeline of the schedule with these `times`. Its `total` predicts the time of a step without its `end`."""
        return timeline(self.schedule, self.times())

    def idle(self) -> Idle:
        """Means over the steps."""
        num_ranks, period = self.schedule.num_ranks, fmean(self.stops) + self.between
        waits, messages, ends = 0.0, 0.0, 0.0
        for step, stop in zip(self.steps, self.stops, strict=True):
            gaps = list(self._gaps(step))
            waits += sum(gap.schedule for gap in gaps) + sum(step.total - ended[-1] for ended in step.ended)
            messages += sum(gap.message for gap in gaps)
            ends += (stop - step.total) * num_ranks
        whole = period * num_ranks * len(self.steps)
        return Idle(waits / whole, messages / whole, ends / whole, self.between / period)

    def svg(self) -> str:
        """A picture of the planned timeline, and of that of the last step."""
        last, planned = self.steps[-1], self.planned()
        name = f"{self.schedule.name}, {self.schedule.num_micro} micro-batches"
        return svg(
            [
                (f"planned, {name}, with the measured time of each stage: {planned.total:.4g} s", planned),
                (f"measured: {last.total:.4g} s; idle of the last {len(self.steps)} steps: {self.idle()}", last),
            ],
            stages_per_rank=self.schedule.stages_per_rank,
        )

    def _gaps(self, step: Timeline) -> Iterator["_Gap"]:
        """The time before each action."""
        ended = {
            action: end
            for program, ends in zip(step.programs, step.ended, strict=True)
            for action, end in zip(program, ends, strict=True)
        }
        for rank, program in enumerate(step.programs):
            before = 0.0
            for action, begun, end in zip(program, step.begun[rank], step.ended[rank], strict=True):
                needed = self.schedule.needed(action)
                computed = max((ended.get(each, 0.0) for each in needed), default=0.0)
                is_remote = any(self.schedule.rank_of(each.stage) != rank for each in needed if each in ended)
                waited = min(max(computed - before, 0.0), begun - before)
                yield _Gap(waited, begun - before - waited, is_remote and waited > 0)
                before = end


class _Gap(NamedTuple):
    schedule: float
    """Seconds until the result that the action needs was computed."""
    message: float
    """Seconds from then until the action began."""
    is_message: bool
    """Whether the rank waited for a result of another rank, before that was computed and after."""


def gathered(comm: Communicator, schedule: Schedule, records: Sequence[Record]) -> Measured:
    """The records of all ranks, on all ranks. Collective. ValueError on all ranks if there are none."""
    if not records:
        raise ValueError("pipeline: no step has run, so there are no times")
    of_ranks: list[list[Record]] = comm.all_gather_object(list(records))
    programs = tuple(schedule.program(rank) for rank in range(schedule.num_ranks))
    steps, stops = [], []
    for of_step in zip(*of_ranks, strict=True):
        # The ranks of a node have one clock. Clocks of several nodes are set by the start of the step, which all ranks wait for.
        first = min(record.start for record in of_step)
        zeros = [first if comm.num_nodes == 1 else record.start for record in of_step]
        begun, ended = (
            tuple([at - zero for at in getattr(record, what)] for record, zero in zip(of_step, zeros, strict=True))
            for what in ("begun", "ended")
        )
        steps.append(Timeline(programs, begun, ended))
        stops.append(max(record.stop - zero for record, zero in zip(of_step, zeros, strict=True)))
    pairs = [(one, other) for mine in of_ranks for one, other in pairwise(mine)]
    between = fmean(other.start - one.stop for one, other in pairs) if pairs else 0.0
    return Measured(schedule, steps, stops, between)
