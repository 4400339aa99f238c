"""A run that survives the loss of ranks and hosts: the public names of job/elastic."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpitrain.job.elastic import Layout, Marks, State, next_layout, run, starting

__all__ = ["Layout", "Marks", "State", "next_layout", "run", "starting"]

__path__: list[str] = []  # a package for old paths of modules, which _moved.py leads to job/elastic


def __getattr__(name: str) -> Any:
    if name in __all__:  # loading torch takes seconds
        return getattr(import_module("mpitrain.job.elastic"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
