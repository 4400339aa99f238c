"""Module paths of earlier versions that programs of users may import: they lead to the modules of today until 0.3.0."""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any

MOVED = {
    "mpitrain.bench": "mpitrain.tools.bench",
    "mpitrain.config.": "mpitrain.job.config.",
    "mpitrain.data.": "mpitrain.job.data.",
    "mpitrain.elastic.marks": "mpitrain.job.record.files.marks",
    "mpitrain.elastic.": "mpitrain.job.elastic.",
    "mpitrain.health.": "mpitrain.job.health.",
    "mpitrain.monitor.reading": "mpitrain.view.reading",
    "mpitrain.monitor": "mpitrain.job.record",
}
"""The new path of a module, or of a package with all of its modules, by the old one.

A dot at the end: of the modules in a package whose own name stays, for its public names (mpitrain/data.py and the like).
"""


class _Moved(MetaPathFinder, Loader):
    """Imports the module of today under its old path: both are one module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if new_path(fullname) is None else ModuleSpec(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        new = new_path(old)
        assert new is not None
        warnings.warn(f"{old} is {new}; the old path goes with 0.3.0", DeprecationWarning, stacklevel=2)
        sys.modules[old] = import_module(new)

    def get_code(self, fullname: str) -> CodeType | None:
        """For `python -m OLD_PATH`."""
        spec: Any = find_spec(new_path(fullname) or fullname)
        code: CodeType | None = spec.loader.get_code(spec.name)
        return code


def new_path(name: str) -> str | None:
    """The path of today of a module; None if it has not moved."""
    for old, new in MOVED.items():
        if name == old or name.startswith(f"{old.removesuffix('.')}."):
            return new + name[len(old) :]
    return None


def keep_old_paths() -> None:
    """Let imports of old paths work in this process."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Moved())
