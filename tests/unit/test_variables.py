"""The register of environment variables has all names that the sources use, and docs/admin.md has its table."""

import re
from pathlib import Path

from collectives.variables import VARIABLES, table

ROOT = Path(__file__).resolve().parents[2]
NO_VARIABLES = {"MPITRAIN_PACK_VALUES"}
"""A mark in a file."""


def test_each_name_in_the_sources_is_registered() -> None:
    found: set[str] = set()
    for folder in ("collectives", "ckpt", "mpitrain", "mpirun", "examples"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix != ".pyc" and path != ROOT / "collectives/variables.py":
                found |= set(
                    re.findall(r"\b(?:MPITRAIN|COLLECTIVES|CKPT)_[A-Z][A-Z0-9_]*\b", path.read_text(errors="replace"))
                )
    assert found - NO_VARIABLES == {one.name for one in VARIABLES}


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs/admin.md").read_text()
    assert table() in page, "replace the table in docs/admin.md by what `python -m collectives.variables` prints"


def test_the_names_are_in_order_and_once() -> None:
    names = [one.name for one in VARIABLES]
    assert names == sorted(set(names))
