"""The table of outcomes, as Markdown."""

import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.chaos.cases import CASES
from benchmarks.chaos.verdicts import Outcome


def read(file: Path) -> list[Outcome]:
    """The outcomes in a results file."""
    return [msgspec.json.decode(line, type=Outcome) for line in file.read_bytes().splitlines()]


def shown(outcome: Outcome) -> str:
    """An outcome in words."""
    words = ["as expected" if outcome.ok else "failed"]
    if outcome.noticed_s is not None:
        words.append(f"noticed after {outcome.noticed_s:.2f} s")
    if outcome.recovered_s is not None:
        words.append(f"step after {outcome.recovered_s:.2f} s, {outcome.repeated} steps again")
    return ", ".join([*words, outcome.note] if outcome.note else words)


def markdown(outcomes: Sequence[Outcome]) -> str:
    """A row for each case that has outcomes."""
    lines = [
        "| what | as expected | seconds to the notice: median, longest | seconds from the notice to the end of the first step: "
        "median, 95 %, longest | most steps done again |",
        "| --- | --- | --- | --- | --- |",
    ]
    for case in CASES:
        its = [outcome for outcome in outcomes if outcome.case == case.name]
        if its:
            lines.append(f"| {case.words} | {sum(each.ok for each in its)} of {len(its)} | {_columns(its)} |")
    return "\n".join(lines)


def _columns(outcomes: Sequence[Outcome]) -> str:
    noticed = [each.noticed_s for each in outcomes if each.noticed_s is not None]
    recovered = sorted(each.recovered_s for each in outcomes if each.recovered_s is not None)
    repeated = [each.repeated for each in outcomes if each.repeated is not None]
    first = f"{statistics.median(noticed):.2f}, {max(noticed):.2f}" if noticed else ""
    if not recovered:
        return f"{first} | {outcomes[-1].note} | "
    late = recovered[min(-(-95 * len(recovered) // 100), len(recovered)) - 1]
    return f"{first} | {statistics.median(recovered):.2f}, {late:.2f}, {recovered[-1]:.2f} | {max(repeated)}"
