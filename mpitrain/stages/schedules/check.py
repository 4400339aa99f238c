"""Proves a schedule: each action runs once, no rank waits for ever, messages are in order, and the promises of the literature hold."""

import random
from collections import Counter
from collections.abc import Iterator

from mpitrain.stages.schedules import SCHEDULES
from mpitrain.stages.schedules.schedule import Action, Schedule, Times
from mpitrain.stages.schedules.timeline import ScheduleError, Timeline, timeline

__all__ = ["ScheduleError", "check", "drawn_schedules", "small_schedules"]

_TIMES = (Times(1, 1, 1), Times(2, 3, 2), Times(3, 2, 1))
"""For which the idle time is compared with its formula: equal ones, and a backward or a forward that takes longer."""


def check(schedule: Schedule) -> Timeline:
    """Prove `schedule`; returns its timeline with actions of one second. ScheduleError with the first error found."""
    programs = [schedule.program(rank) for rank in range(schedule.num_ranks)]
    _check_actions(schedule, programs)
    check_messages(schedule, programs)
    for rank, program in enumerate(programs):
        _check_order(rank, program)
        if (found := _peak(program)) != (promised := schedule.peak(rank)):
            raise ScheduleError(f"rank {rank} holds the activations of {found} forwards; the formula says {promised}")
    unit = timeline(schedule, _TIMES[0])  # proves that no rank waits for ever
    for times in _TIMES:
        if (promise := schedule.idle(times)) is None:
            continue
        run = unit if times is _TIMES[0] else timeline(schedule, times)
        idle = max(map(run.span, range(schedule.num_ranks))) - schedule.num_micro * times.work
        if abs(idle - promise) > 1e-9 * (1 + promise):
            raise ScheduleError(f"a rank idles for {idle:g} s at {times}; the formula says {promise:g} s")
    return unit


def small_schedules(max_ranks: int = 16, max_micro: int = 32) -> Iterator[Schedule]:
    """Each schedule wherever it is defined, up to these numbers."""
    for num_ranks in range(1, max_ranks + 1):
        for num_micro in range(1, max_micro + 1):
            for name in SCHEDULES:
                yield from _made(name, num_ranks, num_micro)


def drawn_schedules(seed: int, max_ranks: int = 64, max_micro: int = 256) -> Iterator[Schedule]:
    """Schedules of randomly drawn numbers, without end."""
    draw = random.Random(seed)
    while True:
        yield from _made(draw.choice([*SCHEDULES]), draw.randint(1, max_ranks), draw.randint(1, max_micro))


def _made(name: str, num_ranks: int, num_micro: int) -> Iterator[Schedule]:
    for more in [{"stages_per_rank": count} for count in (2, 3, 4)] if name == "interleaved" else [{}]:
        try:
            yield SCHEDULES[name](num_ranks, num_micro, **more)
        except ValueError:  # it is not defined for these numbers
            return


def _check_actions(schedule: Schedule, programs: list[tuple[Action, ...]]) -> None:
    done = Counter(action for program in programs for action in program)
    for rank, program in enumerate(programs):
        for action in program:
            if done[action] > 1:
                raise ScheduleError(f"{action} runs {done[action]} times")
            if not (0 <= action.stage < schedule.num_stages and 0 <= action.micro < schedule.num_micro):
                raise ScheduleError(f"rank {rank} runs {action}, but there is no such stage or micro-batch")
            if schedule.rank_of(action.stage) != rank:
                raise ScheduleError(
                    f"rank {rank} runs {action}, but its stage is on rank {schedule.rank_of(action.stage)}"
                )
        begun = set()
        for kind, stage, micro in program:
            needed = {"B": "F", "I": "F", "W": "I"}.get(kind)
            if needed is not None and (needed, stage, micro) not in begun:
                raise ScheduleError(f"rank {rank} runs {Action(kind, stage, micro)} before {needed}{stage}.{micro}")
            begun.add((kind, stage, micro))
    whole = sum(action.kind == "B" for action in done)
    halves = Counter(action.kind for action in done)
    expected = schedule.num_stages * schedule.num_micro
    if halves["F"] != expected or whole + halves["I"] != expected or halves["I"] != halves["W"]:
        raise ScheduleError(f"expected {expected} forwards and as many backwards, got {dict(halves)}")
    for action in done:
        if action.kind == "B" and action._replace(kind="I") in done:
            raise ScheduleError(f"{action} runs whole and in halves")


def _check_order(rank: int, program: tuple[Action, ...]) -> None:
    """ScheduleError unless each stage has its gradients of weights, and all else, in the order of the micro-batches, as slices need."""
    done: Counter[tuple[int, str]] = Counter()
    for action in program:
        for what in {"B": "IW"}.get(action.kind, action.kind):
            if done[action.stage, what] != action.micro:
                raise ScheduleError(f"rank {rank} runs {action} before that of micro-batch {done[action.stage, what]}")
            done[action.stage, what] += 1


def check_messages(schedule: Schedule, programs: list[tuple[Action, ...]]) -> None:
    """ScheduleError unless activations arrive between two ranks in the order in which they are needed, and so do gradients."""
    sent: dict[tuple[int, int, str], list[tuple[int, int]]] = {}
    needed: dict[tuple[int, int, str], list[tuple[int, int]]] = {}
    last, rank_of = schedule.num_stages - 1, [schedule.rank_of(stage) for stage in range(schedule.num_stages)]
    for rank, program in enumerate(programs):
        for kind, stage, micro in program:
            if kind == "W":
                continue
            what, way = ("activations", 1) if kind == "F" else ("gradients", -1)
            if 0 <= stage + way <= last and rank_of[stage + way] != rank:
                sent.setdefault((rank, rank_of[stage + way], what), []).append((stage, micro))
            if 0 <= stage - way <= last and rank_of[stage - way] != rank:
                needed.setdefault((rank_of[stage - way], rank, what), []).append((stage - way, micro))
    for key in sent.keys() | needed.keys():
        if sent.get(key) != needed.get(key):
            raise ScheduleError(f"rank {key[0]} sends {key[2]} to rank {key[1]} in another order than they are needed")


def _peak(program: tuple[Action, ...]) -> int:
    most = now = 0
    for action in program:
        now += {"F": 1, "B": -1, "I": -1, "W": 0}[action.kind]
        most = max(most, now)
    return most
