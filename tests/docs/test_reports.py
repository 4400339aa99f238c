"""Reports of faults on the pages have the program's words. Tests that make such a fault judge what the program prints."""

import ast
import re

import pytest
import table
from launching import ROOT
from pages import BLOCKS, Block
from table import entry

REPORTS = [block for block in BLOCKS if (entry(table.LEFT_OUT, block) or "").startswith(table.FAULT)]
OF_PYTHON = "most recent call"  # of tracebacks and of faulthandler


@pytest.fixture(scope="session")
def texts() -> set[str]:
    """The texts of the three packages: each string, and the parts of f-strings between their values."""
    found = set()
    for package in ("collectives", "ckpt", "mpitrain"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
                    found.add(" ".join(node.value.split()))
    return found


def unknown(report: str, texts: set[str]) -> list[str]:
    """Where four or more words of a report follow each other that are in no text of the program, nor begin one (the rest left out)."""
    lines = (re.sub(r"^\[rank \d+\]", "", line).rstrip("\\") for line in report.splitlines())
    report = " ".join(" ".join(lines).split())
    is_known = [False] * len(report)
    for text in texts:
        start = report.find(text)
        while start >= 0:
            is_known[start : start + len(text)] = [True] * len(text)
            start = report.find(text, start + 1)
    left = "".join("|" if known else letter for letter, known in zip(report, is_known, strict=True))
    words = re.findall(r"(?:[A-Za-z]+ ){3,}[A-Za-z]+", left)
    return [each for each in words if OF_PYTHON not in each and not any(text.startswith(each) for text in texts)]


@pytest.mark.rest
@pytest.mark.parametrize("block", REPORTS, ids=str)
def test_a_report_has_the_words_of_the_program(block: Block, texts: set[str]) -> None:
    assert not unknown(block.text, texts)


def test_words_that_the_program_does_not_say_are_found(texts: set[str]) -> None:
    said = "[rank 2] rank 1 on a (process 7) has died: its process ended without notice; it was killed by signal 9"
    assert not unknown(said, texts)
    assert unknown(said.replace("without notice", "and gave no notice"), texts) == [
        "its process ended and gave no notice"
    ]
