"""The register of environment variables has all names that the sources use, and docs/admin.md has its table."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from collectives.commands.variables import OTHERS, VARIABLES, table

ROOT = Path(__file__).resolve().parents[2]
NO_VARIABLES = {"MPITRAIN_PACK_VALUES"}
"""A mark in a file."""
READERS = ("environ.get", "environ.pop", "environ.setdefault", "getenv")


def test_each_name_in_the_sources_is_registered() -> None:
    found: set[str] = set()
    for folder in ("collectives", "ckpt", "mpitrain", "mpirun", "examples"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix != ".pyc" and path != ROOT / "collectives/commands/variables.py":
                found |= set(
                    re.findall(r"\b(?:MPITRAIN|COLLECTIVES|CKPT)_[A-Z][A-Z0-9_]*\b", path.read_text(errors="replace"))
                )
    assert found - NO_VARIABLES == {one.name for one in VARIABLES}


def names_in(text: str) -> Iterator[str]:
    """The names that a module reads or sets as literals."""
    for node in ast.walk(ast.parse(text)):
        name: ast.expr | None = None
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
            name = node.slice
        elif isinstance(node, ast.Call) and node.args and ast.unparse(node.func).endswith(READERS):
            name = node.args[0]
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            yield name.value


def test_variables_of_others_that_the_code_names_are_registered() -> None:
    found: dict[str, str] = {}
    for package in ("collectives", "ckpt", "mpitrain"):
        for path in (ROOT / package).rglob("*.py"):
            where = str(path.relative_to(ROOT))
            # what benchmarks and chaos set for the programs that they compare is no setting
            if "/bench/" in where or "/chaos/" in where:
                continue
            if re.search("environ|getenv", text := path.read_text()):
                found |= dict.fromkeys(names_in(text), where)
    assert len(found) > 25
    assert {
        name: where for name, where in found.items() if name not in {one.name for one in (*VARIABLES, *OTHERS)}
    } == {}


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs/admin.md").read_text()
    for part in (table(), table(OTHERS)):
        assert part in page, (
            "replace the tables in docs/admin.md by what `python -m collectives.commands.variables` prints"
        )


def test_the_names_are_in_order_and_once() -> None:
    for names in ([one.name for one in VARIABLES], [one.name for one in OTHERS]):
        assert names == sorted(set(names))
