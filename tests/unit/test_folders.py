"""The folders show where a line of code belongs: few modules in each, no circles of imports, names that say of what they are, and no
module that hides a function."""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("collectives", "ckpt", "mpitrain", "benchmarks")
MAX_MODULES = 16
MAX_LINES = 400
NAMES_OF_PYTHON = {"_replace", "_fields", "_asdict"}  # of a NamedTuple


def modules() -> dict[str, Path]:
    """The file of each module of the three packages."""
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path, known: dict[str, Path], *, for_types: bool = True) -> Iterator[str]:
    """The modules that a file imports anywhere, also within functions. `for_types`: also for types alone."""
    tree = ast.parse(path.read_text())
    ifs = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    left_out = set() if for_types else {id(each) for node in ifs for each in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name in known:
                    yield name
                elif node.module in known:
                    yield node.module


def test_no_circle_of_imports() -> None:
    known = modules()
    graph = {name: {other for other in imported(path, known) if other != name} for name, path in known.items()}
    assert sum(map(len, graph.values())) > len(graph)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_no_circle_of_sibling_folders() -> None:
    """Imports between the folders, and files, that lie in one folder go one way. Those for types alone do not count."""
    known = modules()
    packages = {name for name, path in known.items() if path.name == "__init__.py"}
    edges: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name, path in known.items():
        if name in packages and path.parent.parent == ROOT:
            continue  # the face of a package hands on the names of all folders
        for other in imported(path, known, for_types=False):
            a, b = name.split("."), other.split(".")
            depth = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            if 0 < depth < min(len(a), len(b)):
                edges["/".join(a[:depth])][a[depth]].add(b[depth])
    found = set()
    for folder, graph in edges.items():
        for circle in circles(graph):
            inside = tuple(sorted(each for each in circle if (ROOT / folder / each).is_dir()))
            if len(inside) > 1:
                found.add((folder, inside))
    assert found == set()


def circles(graph: Mapping[str, Collection[str]]) -> Iterator[set[str]]:
    """The largest sets of nodes of which each reaches all others."""

    def reached(node: str) -> set[str]:
        found: set[str] = set()
        left = [node]
        while left:
            for other in graph.get(left.pop(), ()):
                if other not in found:
                    found.add(other)
                    left.append(other)
        return found

    reach = {node: reached(node) for node in graph}
    seen: set[str] = set()
    for node in sorted(graph):
        circle = {other for other in reach[node] if node in reach.get(other, ())}
        if node in reach[node] and node not in seen and len(circle) > 1:
            seen |= circle
            yield circle


def rooms() -> dict[str, set[str]]:
    """What each folder of the project may import of the others, without itself. "job.record" is mpitrain/job/record."""
    may: dict[str, set[str]] = {"collectives": set(), "ckpt": {"collectives"}, "files": {"collectives"}}
    packages = {"collectives", "ckpt"}
    bottom = {"plans", "torch_glue"}
    parallel = {"sharding", "tensor", "stages"}
    top = {"weights", "models"}
    may |= dict.fromkeys(bottom, packages)
    may["placement"] = packages | bottom
    may["optim"] = packages | bottom | {"placement"}
    may |= dict.fromkeys(parallel, may["optim"] | {"optim"})
    may |= {each: may["optim"] | {"optim"} | parallel | top - {each} for each in top}
    library = may["optim"] | {"optim"} | parallel | top
    may["job"] = library | {"files", "job.record"}
    may["job.record"] = library | {"files", "job"}
    may["view"] = packages | {"files", "job.record"}
    may["tools"] = may["job"] | {"job", "view"}
    may["benchmarks"] = may["tools"] | {"tools"}
    return may


def test_imports_between_rooms_go_one_way() -> None:
    """collectives, ckpt < the library < job < tools < benchmarks, and job/record < view < tools.

    The public modules beside the folders, and the command line, may import all.
    """
    may = rooms()
    known = modules()
    faces = {"mpitrain", *(f"mpitrain.{path.stem}" for path in (ROOT / "mpitrain").glob("*.py"))} - {"mpitrain.files"}

    def room(name: str) -> str:
        inner = name.removeprefix("mpitrain.")
        return "job.record" if f"{inner}.".startswith("job.record.") else inner.partition(".")[0]

    wrong = [
        f"{name} imports {other}"
        for name, path in known.items()
        if name not in faces
        for other in imported(path, known, for_types=False)
        if room(other) not in {room(name)} | may[room(name)] and not (room(name) == "benchmarks" and other in faces)
    ]
    assert wrong == []
    assert {room(name) for name in known if name not in faces} == may.keys()  # the table has no room of before


def test_no_folder_holds_too_many_modules() -> None:
    crowded = {}
    for folder in {path.parent for path in modules().values()}:
        files = [path for path in folder.iterdir() if path.suffix == ".py"]
        packages = [path for path in folder.iterdir() if (path / "__init__.py").exists()]
        if max(len(files), len(packages)) > MAX_MODULES:
            crowded[str(folder.relative_to(ROOT))] = len(files), len(packages)
    assert crowded == {}


def test_no_file_is_too_long() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in modules().values()}
    assert {name: num for name, num in lines.items() if num > MAX_LINES} == {}


def public_classes(path: Path) -> set[str]:
    """The names without an underscore of the classes that a file defines."""
    body = ast.parse(path.read_text()).body
    return {node.name for node in body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")}


def test_no_public_class_name_stands_in_two_files_of_a_package() -> None:
    """Whoever searches for a class by its name finds it, and nothing else of that package."""
    twice = {}
    for package in ("collectives", "ckpt", "mpitrain"):
        files: dict[str, list[str]] = defaultdict(list)
        for path in sorted((ROOT / package).rglob("*.py")):
            for name in public_classes(path):
                files[name].append(str(path.relative_to(ROOT)))
        assert len(files) > 50
        twice |= {f"{name} of {package}": where for name, where in files.items() if len(where) > 1}
    assert twice == {}


def test_a_file_of_a_command_or_a_report_says_of_what() -> None:
    """The file of a command is called by the word that a user types: watch_command.py."""
    names = {"command.py", "report.py"}
    assert [name for name, path in modules().items() if path.name in names] == []


def private_names_of_others(path: Path) -> Iterator[str]:
    """The private names that a file takes from an object of which it defines no such name."""
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {
        node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls")
    }
    for node in nodes:
        match node:
            case ast.Attribute(value, attr) if attr.startswith("_") and not attr.startswith("__"):
                if attr not in own | NAMES_OF_PYTHON and ast.unparse(value) not in ("sys", "os", "error"):
                    yield ast.unparse(node)


def test_no_module_of_collectives_uses_private_names_of_another() -> None:
    """`error._...` is a mark on an exception, which diagnosis/ makes and reads in two places."""
    found = {
        name: used
        for name, path in modules().items()
        if name.startswith("collectives.") and (used := sorted(set(private_names_of_others(path))))
    }
    assert found == {}


def test_no_module_hides_a_public_function() -> None:
    """Whatever was imported before, a public name is what it says, and no module of that name."""
    script = """
import importlib, inspect, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
for package in ("collectives", "ckpt", "mpitrain", "mpitrain.sharding"):
    public = importlib.import_module(package)
    assert len(public.__all__) > 5
    for name in public.__all__:
        value = getattr(public, name)
        assert callable(value) and not inspect.ismodule(value), (package, name, value)
"""
    # those that are programs, or need what is not installed everywhere
    left_out = {name for name in modules() if name.endswith("__main__")}
    names = sorted(modules().keys() - left_out)
    result = subprocess.run(
        [sys.executable, "-c", script, *names], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
