"""Where a rank is in its program, as text: in the note of an error, and in the reports of waits (collectives/diagnosis/)."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from mpitrain.stages.schedules import Action


def places_of(program: Sequence[Action], at: int) -> str:
    """The micro-batches of a rank's stages, while the action number `at` of its program runs. A line for each stage."""
    lines = [f"pipeline: an error in {in_program(program, at)}; the micro-batches of this rank's stages:"]
    for stage in sorted({action.stage for action in program}):
        actions: dict[int, list[int]] = {}  # the numbers of the actions of each micro-batch
        for number, action in enumerate(program):
            if action.stage == stage:
                actions.setdefault(action.micro, []).append(number)
        runs = []
        for place, run in groupby(sorted(actions), lambda micro: _place(program, at, actions[micro])):  # noqa: B023
            micros = list(run)
            shown = f"{micros[0]}" if len(micros) == 1 else f"{micros[0]} to {micros[-1]}"
            runs.append(f"{shown} {place}")
        lines.append(f"  stage {stage}: {', '.join(runs)}")
    return "\n".join(lines)


def _place(program: Sequence[Action], at: int, numbers: Sequence[int]) -> str:
    """Of one micro-batch in one stage, whose actions have these numbers."""
    if at in numbers:
        return f"in the {program[at].name}"
    done = [number for number in numbers if number < at]
    if not done:
        return "not begun"
    return "done" if len(done) == len(numbers) else f"after the {program[done[-1]].name}"


def in_program(program: Sequence[Action], at: int) -> str:
    """The action number `at`."""
    return f"the {program[at].words} (action {at + 1} of {len(program)})"


def of_message(local: Mapping[str, Any]) -> str:
    """The words for a wait in `Messages.receive`, by its local variables."""
    what = "the output" if local["kind"] == "F" else "the gradient of the input"
    rank = local["self"].rank_of(local["stage"])
    return (
        f"the wait for {what} of stage {local['stage']}, micro-batch {local['micro']}, from rank {rank} of the pipeline"
    )
