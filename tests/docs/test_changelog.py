"""CHANGELOG.md is whole: a merge that mixes two of its entries leaves half sentences, or an entry twice."""

import re
from collections import Counter

from launching import ROOT

TEXT = (ROOT / "CHANGELOG.md").read_text()
BLOCKS = [" ".join(block.split()) for block in re.split(r"\n\n|\n(?=- |#)", TEXT)]
ENTRIES = [block.removeprefix("- ") for block in BLOCKS if block.startswith("- ")]


def wrong(entry: str) -> str:
    """What an entry lacks, or ""."""
    plain = re.sub(r"`[^`]*`", "", entry)
    if not entry.endswith("."):
        return "the end of its last sentence"
    if re.search(r"[.:] \(\[docs", entry):
        return "the sentence of its link"
    if entry.count("`") % 2 or plain.count("(") != plain.count(")"):
        return "one of two backticks or brackets"
    return ""


def test_each_entry_is_whole() -> None:
    assert len(ENTRIES) > 300
    assert not [(entry[:60], lack) for entry in ENTRIES if (lack := wrong(entry))]


def test_half_entries_are_found() -> None:
    assert wrong("`python -m ckpt` ended with 0 before. ([docs](docs/checkpoints.md)).")
    assert wrong("So do documents: each rank reads")
    assert wrong("Gradients of inputs (`grad`, as in penalties, are no round.")


def test_no_entry_stands_twice() -> None:
    starts = Counter(entry[:60] for entry in ENTRIES)
    assert not [start for start, count in starts.items() if count > 1]


def test_each_line_belongs_to_an_entry_or_a_heading() -> None:
    headings = [block for block in BLOCKS if not block.startswith(("- ", "#"))]
    assert all(block.endswith((":", ".")) for block in headings), headings
