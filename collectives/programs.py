"""Python programs of this project that a process starts."""

import os
import sys
from collections.abc import Iterator


def python(module: str) -> list[str]:
    """The words of a command that runs a module of this project as a program of its own.

    The program imports nothing from the current folder, in which others may have put a module of any name, unless this process has
    imported a module from there: this project, or one of the user's.
    """
    return [sys.executable, *([] if _imports_from_here() else ["-P"]), "-m", module]


def import_paths() -> list[str]:
    """The folders from which this process imports, for a child that takes over no other setting of Python (`-I`).

    Without the current folder, except as in `python`.
    """
    here = set() if _imports_from_here() else _here()
    return [path for path in map(os.path.abspath, filter(None, sys.path)) if path not in here]


def _here() -> set[str]:
    """The current folder; empty if it is gone."""
    try:
        return {os.getcwd(), os.path.realpath(os.curdir)}
    except OSError:
        return set()


def _imports_from_here() -> bool:
    here = _here()
    return any(
        os.path.dirname(place) in here
        for name, module in list(sys.modules.items())
        if "." not in name and name not in ("__main__", "__mp_main__")
        for place in _places(module)
    )


def _places(module: object) -> Iterator[str]:
    """The folder of a package, or the file of a module."""
    try:
        folders = list(getattr(module, "__path__", ()))
    except Exception:  # of a module that is loaded lazily
        folders = []
    yield from map(str, folders)
    if not folders and isinstance(file := getattr(module, "__file__", None), str):
        yield file
