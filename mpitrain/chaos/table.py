"""The table of outcomes, as Markdown."""

import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

from mpitrain.chaos.cases import CASES
from mpitrain.chaos.trial import Outcome


def read(file: Path) -> list[Outcome]:
    """The outcomes in a results file."""
    return [msgspec.json.decode(line, type=Outcome) for line in file.read_bytes().splitlines()]


def shown(outcome: Outcome) -> str:
    """An outcome in words."""
    if outcome.recovered_s is None:
        return "went on" if outcome.ok else "failed"
    words = f"noticed after {outcome.detected_s:.2f} s, step after {outcome.recovered_s:.2f} s, {outcome.repeated} steps again"
    return words if outcome.ok else f"failed; {words}"


def markdown(outcomes: Sequence[Outcome]) -> str:
    """A row for each case that has outcomes."""
    lines = [
        "| what | went on | seconds from the loss to its notice: median | seconds from the notice to the end of the first step: "
        "median, 95 %, longest | most steps done again |",
        "| --- | --- | --- | --- | --- |",
    ]
    for case in CASES:
        its = [outcome for outcome in outcomes if outcome.case == case.name]
        if its:
            lines.append(f"| {case.words} | {sum(each.ok for each in its)} of {len(its)} | {_columns(its)} |")
    return "\n".join(lines)


def _columns(outcomes: Sequence[Outcome]) -> str:
    detected = [each.detected_s for each in outcomes if each.detected_s is not None]
    recovered = sorted(each.recovered_s for each in outcomes if each.recovered_s is not None)
    repeated = [each.repeated for each in outcomes if each.repeated is not None]
    if not recovered:
        return "| | "
    late = recovered[min(-(-95 * len(recovered) // 100), len(recovered)) - 1]
    times = f"{statistics.median(recovered):.2f}, {late:.2f}, {recovered[-1]:.2f}"
    return f"{statistics.median(detected):.2f} | {times} | {max(repeated)}"
