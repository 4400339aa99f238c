"""The register of environment variables has all names that the sources use, and docs/admin.md has its table."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from collectives.commands.variables import OTHERS, VARIABLES, table

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("collectives", "ckpt", "mpitrain", "benchmarks", "mpirun", "examples")
NO_VARIABLES = {"MPITRAIN_PACK_VALUES"}
"""A mark in a file."""
NAME = r"[A-Z][A-Z0-9]+(?:_[A-Za-z0-9]+)*"
FAMILIES = re.compile(
    "(?:SLURM|SRUN|PBS|LSB|FLUX|COBALT|OMPI|OPAL|PMIX?|PALS|PRTE|MPICH|MPIR|MPI4PY|MV2|HYDRA|HYDI|OMP|NCCL|HDF5|HF|UV|WANDB|TORCH.*|XDG)_.+"
)
"""Names that are variables in any module. In a module that reads variables, any name with an underscore may be one, but for:"""
OTHER_NAMES = re.compile(
    "NCCL_(MAX|MIN|PROD|SUM|U?INT8|U?INT32|U?INT64|B?FLOAT[0-9]+)|MPIX_.+|MPI_THREAD_MULTIPLE|CLOCK_BOOTTIME|STAGE_OUT|PBS_INTERACTIVE|MPITRAIN_"
)
OF_BASH = re.compile("BASH_.*|EUID|IFS|SECONDS|ORIGIN")
"""The last one is of the loader of libraries."""
READERS = {"get", "pop", "setdefault", "getenv"}


def sources() -> Iterator[tuple[Path, str]]:
    for folder in SOURCES:
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix != ".pyc" and path != ROOT / "collectives/commands/variables.py":
                yield path.relative_to(ROOT), path.read_text(errors="replace")


def test_each_name_in_the_sources_is_registered() -> None:
    found: set[str] = set()
    for _, text in sources():
        found |= set(re.findall(r"\b(?:MPITRAIN|COLLECTIVES|CKPT)_[A-Z][A-Z0-9_]*\b", text))
    assert found - NO_VARIABLES == {one.name for one in VARIABLES}


def names_in(text: str) -> Iterator[str]:
    """The names that a module reads or sets: literals, constants, lists of them, keywords, and those of scripts in it."""
    reads = re.search(r"environ|getenv", text)
    if not reads and not re.search(rf"\b{FAMILIES.pattern}|\$\{{?[A-Z]", text):
        return  # saves most of the time
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Subscript) and is_environ(node.value):
            yield from literal(node.slice)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Attribute):
            if node.func.attr in READERS and (is_environ(node.func.value) or node.func.attr == "getenv"):
                yield from literal(node.args[0])
        elif isinstance(node, ast.keyword) and reads and re.fullmatch(NAME, node.arg or ""):
            yield str(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (name for name in re.findall(rf"\$\{{?({NAME})", node.value) if "_" in name)
            words = node.value.split()
            if all(re.fullmatch(f"{NAME}_?", word) for word in words):
                yield from (word for word in words if FAMILIES.fullmatch(word) or (reads and "_" in word))


def is_environ(node: ast.expr) -> bool:
    return "environ" in (getattr(node, "attr", ""), getattr(node, "id", ""))


def literal(name: ast.expr) -> Iterator[str]:
    if isinstance(name, ast.Constant) and isinstance(name.value, str):
        yield name.value


def names_in_script(text: str) -> Iterator[str]:
    """The names in capitals that a script of a shell reads, sets or unsets: its own variables have small letters."""
    text = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)
    yield from re.findall(rf"\$\{{?[#!]?({NAME})", text)
    yield from re.findall(rf"(?:^|[\s;(])({NAME})\+?=", text, re.MULTILINE)
    for words in re.findall(r"\b(?:unset|env -u) ([^;&|\n]+)", text):
        yield from re.findall(rf"\b{NAME}\b", words)


def test_ways_to_name_a_variable_are_found() -> None:
    module = """
        import os
        CONSTANT, TABLE = "SLURM_ONE", ("AN_TWO", "OMPI_MCA_three", "FOUR_")
        os.environ["FIVE"], os.environ.get("SIX"), "AN_SEVEN AN_EIGHT".split(), dict(os.environ, AN_NINE="1")
        print("no AN_NAME", f"AN_{1}", "[ -n ${AN_TEN-} ]", dict(Other="SMALL"))
    """
    found = "SLURM_ONE AN_TWO OMPI_MCA_three FOUR_ FIVE SIX AN_SEVEN AN_EIGHT AN_NINE AN_TEN"
    assert {name for name in names_in(inspect.cleandoc(module)) if name != "AN_"} == set(found.split())
    assert set(names_in('NAME = "SLURM_ONE", "OTHER_NAME"')) == {"SLURM_ONE"}
    script = (
        'export ONE=1; TWO=2 run\n# $NO\n[ -n "${THREE-$FOUR}" ] && unset FIVE SIX; env -u SEVEN -u EIGHT run; ${small}'
    )
    assert set(names_in_script(script)) == {"ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT"}


def test_variables_of_others_that_the_code_and_the_scripts_name_are_registered() -> None:
    found: dict[str, Path] = {}
    for path, text in sources():
        if path.suffix == ".py":
            found |= dict.fromkeys((name for name in names_in(text) if not OTHER_NAMES.fullmatch(name)), path)
        elif path.suffix in (".sh", ".sbatch", ".pbs") or re.match("#!.*sh\n", text):
            found |= dict.fromkeys((name for name in names_in_script(text) if not OF_BASH.fullmatch(name)), path)
    assert len(found) > 150
    known = {one.name for one in (*VARIABLES, *OTHERS)}
    missing = {name: path for name, path in found.items() if name not in known and not name.startswith("UV_")}
    assert {name: path for name, path in missing.items() if not (name.endswith("_") and f"{name}*" in known)} == {}
    unused = {one.name.removesuffix("*") for one in OTHERS} - found.keys() - {"UV_"}
    assert unused <= {"RANK"}, "no source names them: remove them"  # that one stands in a tuple without an underscore


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs/admin.md").read_text()
    for part in (table(), table(OTHERS)):
        assert part in page, (
            "replace the tables in docs/admin.md by what `python -m collectives.commands.variables` prints"
        )


def test_the_names_are_in_order_and_once() -> None:
    for names in ([one.name for one in VARIABLES], [one.name for one in OTHERS]):
        assert names == sorted(set(names))
