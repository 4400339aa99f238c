"""Whether an output has the shape of the one that a page shows: the same kinds of lines, in the same order."""

import re
from collections.abc import Callable, Sequence

RULES = [
    (re.compile(r"\x1b\[[0-9;]*[A-Za-z]"), ""),  # colours
    (re.compile(r"(?<![\w.])/[\w./+-]+"), "/path"),
    (re.compile(r"\b[0-9a-f]{10}\b"), "0"),  # a commit
    (re.compile(r"[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?"), "0"),
    (re.compile(r"\b0 (B|[KMG]iB|[kMG]?B|bytes)\b"), "0 bytes"),
    (re.compile(r"\b0 (ns|us|µs|ms|s|min|h|d)\b"), "0 seconds"),
    (re.compile(r"[─━═█┃│┏┡└┌├┳╇┴╯╰]+"), "|"),
    (re.compile(r"[\s|]+"), " "),
]


def kind(line: str) -> str:
    """What stays of a line at another time on another machine: its words, and the places of its numbers."""
    for pattern, replacement in RULES:
        line = pattern.sub(replacement, line)
    return line.strip()


def words(line: str) -> str:
    """A line without the widths of its columns."""
    return " ".join(line.split())


def joined(lines: Sequence[str]) -> list[str]:
    """Lines, with those that go on in the last column after the one that they go on from."""
    whole: list[str] = []
    for line in lines:
        if whole and re.match(r" {20,}\S", line) and re.match(r" {2}\w", whole[-1]):
            whole[-1] += " " + line.strip()
        else:
            whole.append(line)
    return whole


def missing(
    shown: Sequence[str], printed: str, kind: Callable[[str], str] = kind, free: tuple[str, ...] = ()
) -> list[str]:
    """The lines of `shown` that `printed` lacks, or that do not follow there on the line before them.

    A line of "..." stands for any number of lines, and "..." at the end of a line for its rest. A line that begins as one of `free` has
    any text.
    """
    actual = [kind(line) for line in joined(printed.splitlines()) if line.strip()]

    def fits(line: str, at: int) -> bool:
        if at >= len(actual):
            return False
        if line.endswith("..."):
            return actual[at].startswith(kind(line.removesuffix("...")))
        return line.startswith(free) or actual[at] == kind(line)

    absent, place = [], 0
    for run in runs(joined(shown)):
        fitting = {at: sum(fits(line, at + i) for i, line in enumerate(run)) for at in range(place, len(actual))}
        best = max(fitting, key=lambda at: fitting[at], default=place)  # the first of the best
        absent += [line for i, line in enumerate(run) if not fits(line, best + i)]
        place = best + len(run)
    return absent


def runs(lines: Sequence[str]) -> list[list[str]]:
    """The lines between those of "...", without empty ones."""
    found: list[list[str]] = [[]]
    for line in lines:
        if line.strip() == "...":
            found.append([])
        elif line.strip():
            found[-1].append(line)
    return found
