"""The house rule: imports point down, mpitrain -> ckpt -> collectives, and each foreign library has one home."""

import ast
import functools
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STOREYS = ["collectives", "ckpt", "mpitrain", "benchmarks"]  # from the ground up


@functools.cache
def imports(package: str) -> list[tuple[str, str, bool]]:
    """(where, the imported top-level name, whether a mere `import package` runs it) of all import statements of a package."""
    return list(found_imports(package))


def found_imports(package: str) -> Iterator[tuple[str, str, bool]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        tree = ast.parse(path.read_text())
        later = {
            inner
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or is_type_checking(node)
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [package if node.level else node.module or ""]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("__import__", "importlib.import_module"):
                names = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
            for name in names:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", name.partition(".")[0], node not in later


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


@pytest.mark.parametrize("package", STOREYS)
def test_every_storey_is_seen(package: str) -> None:
    assert any(name == "numpy" for _, name, _ in imports(package))


def test_imports_point_down() -> None:
    above = [
        f"{where} imports {name}"
        for level, package in enumerate(STOREYS)
        for where, name, _ in imports(package)
        if name in STOREYS[level + 1 :]
    ]
    assert not above


@pytest.mark.parametrize(
    ("library", "home"), [("mpi4py", "collectives"), ("h5py", "ckpt"), ("fsspec", "ckpt"), ("obstore", "ckpt")]
)
def test_a_library_has_one_home(library: str, home: str) -> None:
    assert any(name == library for _, name, _ in imports(home))
    strangers = [
        where for package in STOREYS if package != home for where, name, _ in imports(package) if name == library
    ]
    assert not strangers


def test_torch_is_a_hard_import_in_mpitrain_alone() -> None:
    hard = [
        where
        for package in ("collectives", "ckpt")
        for where, name, at_once in imports(package)
        if name == "torch" and at_once
    ]
    assert not hard


def test_jax_and_cupy_are_imported_by_who_asked_for_them_alone() -> None:
    """collectives/jax.py is for those who have imported JAX, ckpt/reading/jax_arrays.py for those who ask for its arrays. CuPy is found
    where an array came in, and binds NCCL."""
    homes = {
        "jax": ("collectives/jax.py:", "ckpt/reading/jax_arrays.py:"),
        "cupy": ("collectives/transports/gpu/binding.py:",),
    }
    strangers = [
        f"{where} imports {name}"
        for package in STOREYS
        for where, name, _ in imports(package)
        if name in ("jax", "jaxlib", "cupy", "cupyx")
        and not where.startswith(homes["jax" if "jax" in name else "cupy"])
    ]
    assert not strangers


def test_no_module_brings_in_the_one_for_jax() -> None:
    for package in STOREYS:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)]
                module = getattr(node, "module", None) or ""
                assert "collectives.jax" not in (module, *names, *(f"{module}.{name}" for name in names)), path


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        # importing starts nothing: no MPI, and no second of waiting for torch
        (
            "collectives, collectives.cli, collectives.schedules.check",
            ("mpi4py.MPI", "torch", "jax", "cupy", "matplotlib"),
        ),
        ("ckpt", ("mpi4py.MPI", "torch", "jax", "cupy", "fsspec")),
    ],
)
def test_importing_brings_neither_mpi_nor_torch(modules: str, absent: tuple[str, ...]) -> None:
    script = f"import sys, {modules}; print([name for name in {absent!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-W", "error", "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (result.stdout.strip(), result.stderr) == ("[]", "")


@pytest.mark.parametrize(
    ("folder", "absent"),
    [
        ("mpitrain/job/config", ("torch",)),
        ("mpitrain/job/data", ("torch",)),
        ("mpitrain/job/record", ("torch",)),
        ("mpitrain/view", ("torch", "mpi4py")),
    ],
)
def test_a_folder_is_imported_where_a_library_is_not(folder: str, absent: tuple[str, ...]) -> None:
    """Each of its modules: a program without torch, such as one with JAX, can use them. Functions may import it."""
    names = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    script = """
import importlib, sys
absent, names = sys.argv[1].split(), sys.argv[2:]
sys.modules |= dict.fromkeys(absent)  # an import of None is an ImportError
for name in names:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"{name}: {error}")
assert not {name.partition(".")[0] for name, module in sys.modules.items() if module is not None} & {*absent}
"""
    assert len(names) > 5
    command = [sys.executable, "-c", script, " ".join(absent), *names]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert (result.stdout, result.stderr) == ("", "")


@pytest.mark.parametrize("name", ["data", "elastic", "health", "models", "tensor"])
def test_folders_that_users_name_are_attributes_of_the_package(name: str) -> None:
    """As `mpitrain.elastic.run` after `import mpitrain` alone. Not by the attribute: an import elsewhere may have set it."""
    package = importlib.import_module("mpitrain")
    assert package.__getattr__(name) is importlib.import_module(f"mpitrain.{name}")
