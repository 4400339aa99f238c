"""Whether an output has the shape of the one that a page shows: the same kinds of lines, in the same order."""

import re
from collections.abc import Callable, Sequence

RULES = [
    (re.compile(r"\x1b\[[0-9;]*[A-Za-z]"), ""),  # colours
    (re.compile(r"(?<![\w.])/[\w./+-]+"), "/path"),
    (re.compile(r"\b[0-9a-f]{10}\b"), "0"),  # a commit
    (re.compile(r"[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?"), "0"),
    (re.compile(r"\b0 (B|[KMG]iB|[kMG]?B|bytes|ns|us|µs|ms|s|min|h|d)\b"), "0 unit"),
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


def missing(shown: Sequence[str], printed: str, kind: Callable[[str], str] = kind) -> list[str]:
    """The lines of `shown` of which `printed` has none of the same kind after those before it. A line of "..." stands for any."""
    kinds = iter([kind(line) for line in joined(printed.splitlines())])
    absent = []
    for line in shown:
        expected, is_start = kind(line), line.endswith("...")
        expected = expected.removesuffix("...").strip() if is_start else expected
        if not expected:
            continue
        rest = list(kinds)
        found = (i for i, actual in enumerate(rest) if actual == expected or (is_start and actual.startswith(expected)))
        place = next(found, None)
        if place is None:
            absent.append(line)
        kinds = iter(rest if place is None else rest[place + 1 :])
    return absent
