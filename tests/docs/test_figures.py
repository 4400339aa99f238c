"""Figures of benchmarks stand once: in docs/measured.md, and in docs/figures.md for collectives. Other pages link to them.

A page may repeat a figure that its reader needs for a decision, in a sentence with a link to the section that has it:
`takes 1.5 times as long ([measured](measured.md#training-step-on-a-gpu))`. Limits, defaults and settings are no figures of
benchmarks. Where they look like one, ALLOWED has their words with the reason.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
README = DOCS.parent / "README.md"
HOMES = ("measured.md", "figures.md")
PAGES = [README, *(page for page in sorted(DOCS.glob("*.md")) if page.name not in HOMES)]

NUMBER = r"(?<![\w.,^-])\d+(?:,\d{3})*(?:\.\d+)?"
NUMBERS = rf"{NUMBER}(?:(?: to |, | and ){NUMBER})*"
WORDS = "two|three|four|five|six|seven|eight|nine|ten|twenty|forty|fifty|a hundred"
RATE = r"[kKMGT]i?B/s|[kMG]B a second|tokens/s|[GTP]FLOP/s"
FIGURE = re.compile(
    rf"{NUMBERS} ?(?:%|per cent\b|ms\b|us\b|µs\b|ns\b|{RATE})"
    rf"|(?:{NUMBERS}|\b(?:{WORDS})) times (?:as|faster|slower|longer|less|more)\b"
    r"|\b(?:takes?|took|taken|needs?|needed|costs?) (?:about |only |up to |less than |more than )?"
    rf"{NUMBERS} ?(?:s|seconds|minutes|[kMGT]i?B)\b"
)
"""A figure of a benchmark, by its unit. Plain seconds and bytes are mostly limits: they count behind a verb alone."""
LINKED = re.compile(
    rf"({NUMBERS}) ?(?:%|per cent\b|times\b|(?:ms|us|µs|ns|s|seconds|minutes|hours|[kKMGT]i?B)\b(?!/)|{RATE})"
)
"""What is compared with the section that a sentence links to: the numbers with any unit."""

FROM_A_TEST = "what a test requires"
THRESHOLD = "a fixed rule of the program, not a measurement"
FROM_A_PAPER = "the paper's figure, from which a rule follows"
SETTING = "a limit or a setting"
ALLOWED = {
    "collectives.md": {"an operation that takes 30 s": SETTING, "an operation that takes 600 s": SETTING},
    "data.md": {
        "at most 1 % of `step_s` is normal": "advice, from which value on to look for the cause",
    },
    "data-internals.md": {"may take 384 MiB and 10 s": SETTING},
    "gpu.md": {
        "at most 0.02 % on 2 ranks and 0.21 % on 8 ranks": "follows from the sizes of the block",
        "If more than 2 % of padding": THRESHOLD,
    },
    "monitoring.md": {"are rounded to 10 us": "the digits of a file"},
    "monitoring-figures.md": {'"comm 4%" of the console': "words of a shown output"},
    "monitoring-profile.md": {
        "13.3 − 6.5 + 48.5 = 55.3 ms": "adds up figures of a shown output",
        "that waits 3 % of a step": THRESHOLD,
        "is expected to cost 3 % less": THRESHOLD,
        "expected to gain 3 %": THRESHOLD,
    },
    "monitoring-report.md": {
        "over 5 % of the time of rank 0's steps": THRESHOLD,
        "over 30 % of the time of rank 0's steps": THRESHOLD,
        "for over 5 % of the time of the steps": THRESHOLD,
        "over 30 % of the gradients": THRESHOLD,
        "over 1 % above the best one": THRESHOLD,
    },
    "monitoring-trace.md": {
        "Operators below 0.5 us": THRESHOLD,
        "kernels below 20 us": THRESHOLD,
        "the error is above 100 us": THRESHOLD,
    },
    "pipelines.md": {"they agree within 5 %": FROM_A_TEST},
    "plan.md": {
        "they take 1.4 s together": "an example of a formula",
        "it is within 13 %": FROM_A_TEST,
        "differ by more than 15 %": THRESHOLD,
        "both take 67 s for about 1,050 GB a rank, which is 16 GB/s": FROM_A_PAPER,
    },
    "relaunch.md": {"saves that take 10 s": SETTING},
    "sharding.md": {"at most 2 % of padding": THRESHOLD},
    "silent-faults.md": {"at least 0.5 % of the median": THRESHOLD},
    "training.md": {"agreement within 6 %": FROM_A_TEST},
}
"""By page: words with a figure that is no measurement, and why."""

ROWS = {
    "training step, 101 M parameters": ("| 101 M parameters (width 1024, 8 layers)", 2),
    "peak memory of a rank in a step": ("| peak PSS in training", 2),
    "save 1.2 GB": ("| save |", 2),
    "load 1.2 GB": ("| load, verified |", 3),
    "all-reduce of 64 MiB": ("- **All-reduce.**", 4),
}
"""The rows of README's table, and the lines of docs/measured.md that have their figures: begin of the first one, and how many."""


def blocks(text: str) -> Iterator[str]:
    """Paragraphs, list items and cells of tables, each in one line, without blocks of code."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    block: list[str] = []
    code = False
    for line in [*text.split("\n"), ""]:
        code = line.startswith("    ") and (code or not block)
        starts = re.match(r" *([-*]|\d+\.) |[|#>]", line)
        if (code or starts or not line.strip()) and block:
            yield " ".join(block)
            block = []
        if line.startswith("|"):
            yield from (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
        elif line.strip() and not code:
            block.append(line.strip())


def sentences(text: str) -> Iterator[str]:
    for block in blocks(text):
        yield from re.split(r"(?<=[.:;!?]) +(?=[A-Z`*\[])", block)


def prose(sentence: str) -> str:
    """The sentence without code and without what its links lead to."""
    return re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "``", sentence))


def sections(text: str) -> dict[str, str]:
    """The text below each heading of the second level, by the end of a link to it."""
    parts = re.split(r"^## (.*)\n", text, flags=re.MULTILINE)[1:]
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-"): below
        for heading, below in zip(parts[::2], parts[1::2], strict=True)
    }


def has(text: str, number: str) -> bool:
    return re.search(rf"(?<![\d.,]){re.escape(number)}(?!\d|[.,]\d)", text) is not None


def missing(sentence: str, measured: dict[str, str]) -> list[str]:
    """The figures of a sentence that none of the sections has to which the sentence links."""
    linked = "\n".join(measured[name] for name in re.findall(r"measured\.md#([\w-]+)\)", sentence))
    numbers = [number for found in LINKED.finditer(prose(sentence)) for number in re.findall(NUMBER, found[1])]
    return [number for number in numbers if not has(linked, number)]


def bare(sentence: str, allowed: Iterable[str] = ()) -> list[str]:
    """The figures of a sentence that links to no section of docs/measured.md, and that is not allowed."""
    for words in allowed:
        sentence = sentence.replace(words, "")
    return [] if "measured.md#" in sentence else [found[0] for found in FIGURE.finditer(prose(sentence))]


MEASURED = sections((DOCS / "measured.md").read_text())


def test_the_readme_has_the_figures_of_measured() -> None:
    rows = re.findall(r"^\| (.+) \|$", sections(README.read_text())["measured"], re.MULTILINE)[2:]
    assert len(rows) == len(ROWS)
    lines = (DOCS / "measured.md").read_text().split("\n")
    for row, (name, (start, num_lines)) in zip(rows, ROWS.items(), strict=True):
        (first,) = (place for place, line in enumerate(lines) if line.startswith(start))
        source = "\n".join(lines[first : first + num_lines])
        cells = row.split(" | ")
        assert cells[0].startswith(name)
        numbers = [number for cell in cells[1:] for number in re.findall(NUMBER, cell)]
        assert len(numbers) >= 5, row
        for number in numbers:
            assert has(source, number), f"{name}: docs/measured.md has no {number} in {start}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_figures_beside_a_link_stand_in_its_section(page: Path) -> None:
    for sentence in sentences(page.read_text()):
        if "measured.md#" in sentence:
            assert not missing(sentence, MEASURED), (
                f"{page.name}: its section of docs/measured.md lacks them: {sentence}"
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_other_pages_have_no_figures_of_their_own(page: Path) -> None:
    text = page.read_text()
    if page == README:
        text = text.replace(sections(text)["measured"], "")
    allowed = ALLOWED.get(page.name, {})
    for sentence in sentences(text):
        assert not bare(sentence, allowed), (
            f"{page.name}: move the measurement with machine, setup and command to docs/measured.md, and link to it: {sentence}"
        )
    joined = "\n".join(blocks(text))
    assert not (old := [words for words in allowed if words not in joined]), f"{page.name} no longer has {old}"


@pytest.mark.parametrize(
    "sentence",
    [
        "A step takes 3 ms.",
        "It costs 1 to 2 % of a step.",
        "It is 1.4 times as fast.",
        "It reads 5,050 MB/s.",
        "A save took 13 s.",
        "A rank needs 1.5 GB.",
    ],
)
def test_a_figure_is_found(sentence: str) -> None:
    assert bare(sentence)
    assert not bare(sentence, [sentence])
    linked = sentence[:-1] + " ([measured](measured.md#checkpoints))."
    assert not bare(linked)
    assert missing(linked, {"checkpoints": "no such figure"})
    assert not missing(linked, {"checkpoints": sentence})


@pytest.mark.parametrize(
    "text", ["After 30 s a notice comes.", "`--every 5 ms`", "```\n3 ms\n```", "Text:\n\n    3 ms\n"]
)
def test_limits_and_code_are_no_figures(text: str) -> None:
    assert not [found for sentence in sentences(text) for found in bare(sentence)]
