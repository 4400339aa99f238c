"""When each action of a schedule begins and ends, if actions take known times. No data, no ranks."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mpitrain.stages.schedules.schedule import Action, Kind, Schedule, StageTimes, Times


class ScheduleError(AssertionError):
    """A schedule is wrong."""


class Timeline(NamedTuple):
    """`begun` and `ended`: seconds since the start, of each action of each rank, in the order of its program."""

    programs: tuple[tuple[Action, ...], ...]
    begun: tuple[list[float], ...]
    ended: tuple[list[float], ...]

    @property
    def total(self) -> float:
        return max(ended[-1] for ended in self.ended)

    def span(self, rank: int) -> float:
        """From the beginning of a rank's first action to the end of its last."""
        return self.ended[rank][-1] - self.begun[rank][0]


def timeline(schedule: Schedule, times: Times | StageTimes) -> Timeline:
    """Each rank begins an action as soon as it has ended the one before, and has what the action needs.

    A send waits for no rank. ScheduleError if ranks wait for each other.
    """
    programs = tuple(schedule.program(rank) for rank in range(schedule.num_ranks))
    last = schedule.num_stages - 1
    seconds = _by_stage(times, schedule)
    rank_of = [schedule.rank_of(stage) for stage in range(schedule.num_stages)]
    forward_ended: dict[tuple[int, int], float] = {}
    backward_ended: dict[tuple[int, int], float] = {}
    begun: tuple[list[float], ...] = tuple([] for _ in programs)
    ended: tuple[list[float], ...] = tuple([] for _ in programs)
    clocks, at = [0.0] * len(programs), [0] * len(programs)
    runnable = list(range(len(programs)))
    waiting: dict[tuple[str, int, int], int] = {}  # what a rank waits for
    while runnable:
        rank = runnable.pop()
        program, clock = programs[rank], clocks[rank]
        while at[rank] < len(program):
            kind, stage, micro = program[at[rank]]
            if kind == "F":
                before = ("F", stage - 1, micro) if stage else None
            elif kind == "W":
                before = None
            else:
                before = ("F", stage, micro) if stage == last else ("B", stage + 1, micro)
            if before is not None:
                ready = (forward_ended if before[0] == "F" else backward_ended).get(before[1:])
                if ready is None:
                    waiting[before] = rank
                    break
                if rank_of[before[1]] != rank:
                    ready += times.message
                clock = max(clock, ready)
            begun[rank].append(clock)
            clock += seconds[stage][kind]
            ended[rank].append(clock)
            at[rank] += 1
            if kind != "W":
                done = ("F" if kind == "F" else "B", stage, micro)
                (forward_ended if kind == "F" else backward_ended)[stage, micro] = clock
                if (other := waiting.pop(done, None)) is not None:
                    runnable.append(other)
        clocks[rank] = clock
    for rank, program in enumerate(programs):
        if at[rank] < len(program):
            raise ScheduleError(f"deadlock: rank {rank} waits for ever before {program[at[rank]]}")
    return Timeline(programs, begun, ended)


def _by_stage(times: Times | StageTimes, schedule: Schedule) -> Sequence[Mapping[Kind, float]]:
    """The seconds of one action of each kind, of each stage."""
    if isinstance(times, StageTimes):
        return times.stages
    kinds: tuple[Kind, ...] = ("F", "B", "I", "W")
    return [{kind: times.of(kind, schedule.stages_per_rank) for kind in kinds}] * schedule.num_stages
