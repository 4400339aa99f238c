"""Events as marks on the time axis, and in words. Pure."""

import math
from collections import defaultdict
from typing import NamedTuple

from mpitrain.job.record.parsing.words import event_in_words
from mpitrain.view.reading.run import Event, RunRecord
from mpitrain.view.report.time_axis import TimeAxis

MOST = 200
"""Marks of one group. More events are put together."""
GROUPS = {
    "save": "checkpoint",
    "failure": "failure",
    "desync": "failure",
    "flipped_bit": "failure",
    "skip": "spike or skip",
    "spike": "spike or skip",
    "straggler": "slow rank",
    "begin": "start or recovery",
    "shrink": "start or recovery",
    "restore": "start or recovery",
    "relaunch": "start or recovery",
    "rewind": "start or recovery",
}
OTHER = "other"


class Mark(NamedTuple):
    """One or more events of a group at about one place."""

    group: str
    step: int
    seconds: float
    text: str


def marks_of(run: RunRecord, axis: TimeAxis) -> list[Mark]:
    """The marks of a run's events and of checkpoints without an event, in order of time."""
    by_group: dict[str, list[Mark]] = defaultdict(list)
    for event in run.events:
        seconds = axis.of_event(event)
        if event.step is not None and math.isfinite(seconds):
            group = GROUPS.get(event.kind, OTHER)
            by_group[group].append(Mark(group, event.step, seconds, describe(event)))
    told = {event.step for event in run.events if event.kind == "save"}
    for step in run.checkpoints:
        if step not in told and len(run.steps):
            seconds = axis.of_step(step)
            by_group["checkpoint"].append(Mark("checkpoint", step, seconds, f"Checkpoint after step {step:,}."))
    marks = [mark for group in by_group.values() for mark in _together(sorted(group, key=lambda mark: mark.seconds))]
    return sorted(marks, key=lambda mark: mark.seconds)


def _together(marks: list[Mark]) -> list[Mark]:
    """At most MOST marks: neighbours become one."""
    size = math.ceil(len(marks) / MOST)
    if size <= 1:
        return marks
    found = []
    for begin in range(0, len(marks), size):
        part = marks[begin : begin + size]
        words = f"{len(part)} events ({part[0].group}), steps {part[0].step:,} to {part[-1].step:,}. The first: {part[0].text}"
        found.append(part[0]._replace(text=words))
    return found


def describe(event: Event) -> str:
    """An event in a line."""
    step = "" if event.step is None else f"step {event.step:,}: "
    return step + event_in_words(event.fields)
