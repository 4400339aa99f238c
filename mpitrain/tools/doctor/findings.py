"""What a check says: findings, their merging over hosts, their levels as an exit code, and their form on the screen."""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

_COLUMNS = 100
_MAX_LINES = 4  # of one topic and level: the hosts of a large cluster may each have a finding
_NUM_NAMED = 4  # hosts or ranks in a line
_COLOURS = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}

F = TypeVar("F")


class Level(enum.StrEnum):
    """How bad a finding is: a note costs nothing or little, a warning speed or safety, an error the run."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """One line of the report. `topic`: what was looked at; `where`: hosts or ranks, empty if it concerns all.

    A finding that is not ok has `expected` and `remedy`, too.
    """

    level: Level
    topic: str
    found: str
    expected: str = ""
    remedy: str = ""
    where: str = ""
    group: str = ""

    def to_dict(self) -> dict[str, str]:
        """The fields as text, for JSON."""
        return {name: str(value) for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, fields: Mapping[str, str]) -> "Finding":
        return cls(**{**fields, "level": Level(fields["level"])})  # type: ignore[arg-type]


def ok(topic: str, found: str) -> Finding:
    """A finding without a fault."""
    return Finding(Level.OK, topic, found)


def names(places: Sequence[str]) -> str:
    """Hosts or ranks in words, of many only the first."""
    more = len(places) - _NUM_NAMED
    return ", ".join(places[:_NUM_NAMED]) + (f" and {more} more" if more > 0 else "")


def each(judge: Callable[[F], list[Finding]]) -> Callable[[Mapping[str, F]], list[Finding]]:
    """A judge of one host's (or rank's) facts as a judge of those of all of them, which names the places that differ."""

    def judge_all(facts: Mapping[str, F]) -> list[Finding]:
        return merge({place: judge(its) for place, its in facts.items()})

    return judge_all


def merge(findings: Mapping[str, Sequence[Finding]]) -> list[Finding]:
    """The findings of all places. Equal ones become one, and so do all that are ok, with the first one's text."""
    by_text: dict[tuple[str, ...], list[tuple[str, Finding]]] = {}
    for place, its in findings.items():
        for finding in its:
            differs = "" if finding.level is Level.OK else finding.found + finding.remedy
            by_text.setdefault((finding.topic, finding.level, differs), []).append((place, finding))
    merged: list[Finding] = []
    counts: dict[tuple[str, str], int] = {}
    for (topic, level, _), equal in by_text.items():
        count = counts[topic, level] = counts.get((topic, level), 0) + 1
        if count > _MAX_LINES:
            continue
        first, places = equal[0][1], [place for place, _ in equal]
        if len(findings) == 1:
            merged.append(first)
        elif first.level is Level.OK:
            same = len({finding.found for _, finding in equal}) == 1
            others = f"; {len(places) - 1} more ok" if len(places) > 1 else ""
            merged.append(first if same and len(places) == len(findings) else replace(first, where=places[0] + others))
        else:
            merged.append(replace(first, where="" if len(places) == len(findings) else names(places)))
    for (topic, level), count in counts.items():
        if count > _MAX_LINES:
            index = max(i for i, finding in enumerate(merged) if (finding.topic, finding.level) == (topic, level))
            merged[index] = replace(merged[index], found=f"{merged[index].found} (and {count - _MAX_LINES} more such)")
    return merged


def exit_code(findings: Sequence[Finding], *, strict: bool) -> int:
    """0 without an error, else 1. `strict`: a warning counts as an error."""
    bad = {Level.ERROR, Level.WARNING} if strict else {Level.ERROR}
    return int(any(finding.level in bad for finding in findings))


def summary(findings: Sequence[Finding]) -> str:
    """The numbers of findings of each level in words."""
    parts = []
    for level in reversed(Level):
        if number := sum(finding.level is level for finding in findings):
            parts.append(f"{number} {level}{'s' * (number > 1 and level is not Level.OK)}")
    return ", ".join(parts) or "nothing was checked"


def show(console: Console, findings: Sequence[Finding], *, head: str, strict: bool) -> None:
    """Print the report, in groups, with at most 100 columns."""
    width = min(_COLUMNS, console.width)
    with console.capture() as captured:
        _print(console, findings, head=head, width=width)
        code = exit_code(findings, strict=strict)
        console.print(Text(f"\n{summary(findings)}; exit code {code}", "bold"), width=width)
    text = captured.get()
    if not console.is_terminal:
        text = "".join(f"{line.rstrip()}\n" for line in text.splitlines())  # a table fills its lines
    console.file.write(text)


def _print(console: Console, findings: Sequence[Finding], *, head: str, width: int) -> None:
    console.print(Text(head, "bold"), width=width)
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.group, []).append(finding)
    for group, its in groups.items():
        table = Table.grid(padding=(0, 1))
        for column in (9, 15):
            table.add_column(width=column, no_wrap=False)
        table.add_column(width=width - 26)
        for finding in its:
            text = Text(f"{finding.where}: {finding.found}" if finding.where else finding.found)
            if finding.level is not Level.OK:
                for label, said in (("expected ", finding.expected), ("do: ", finding.remedy)):
                    if said:
                        text.append(f"\n{label}", "dim").append(said)
            table.add_row(Text(f"  {finding.level}", _COLOURS[finding.level]), Text(finding.topic), text)
        console.print(Text(f"\n{group}", "bold"), width=width)
        console.print(table, width=width)


def to_json(findings: Sequence[Finding], *, head: Mapping[str, Any], facts: Mapping[str, Any], strict: bool) -> dict:
    """The report as a JSON object. `facts`: what the checks have measured, by name of the check and place."""
    return {
        **head,
        "exit_code": exit_code(findings, strict=strict),
        "findings": [finding.to_dict() for finding in findings],
        "facts": facts,
    }
