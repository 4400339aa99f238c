"""A run that survives the loss of ranks and hosts.

`run` continues a training loop on the ranks that survive, from copies of its `State` in node memory; `next_layout` says which layout
fits them. A program that a supervisor starts again leaves `Marks`, from `starting` on. Importing this package imports neither torch
nor MPI, because the supervisor (`python -m mpitrain elastic`) runs on hosts that have only Python's standard library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpitrain.elastic.layout import Layout, next_layout
    from mpitrain.elastic.loop import State, run
    from mpitrain.monitor.record.marks import Marks, starting

__all__ = ["Layout", "Marks", "State", "next_layout", "run", "starting"]

_MODULES = {
    "Layout": "mpitrain.elastic.layout",
    "Marks": "mpitrain.monitor.record.marks",
    "State": "mpitrain.elastic.loop",
    "next_layout": "mpitrain.elastic.layout",
    "run": "mpitrain.elastic.loop",
    "starting": "mpitrain.monitor.record.marks",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
