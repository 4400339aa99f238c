"""A run that survives the loss of ranks and hosts.

`run` continues a training loop on the ranks that survive, from copies of its `State` in node memory; `next_layout` says which layout
fits them. A program that a supervisor starts again leaves `Marks`, from `starting` on. Importing this package imports neither torch
nor MPI, because the supervisor (`python -m mpitrain elastic`) runs on hosts that have only Python's standard library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpitrain.job.elastic.layout import Layout, next_layout
    from mpitrain.job.elastic.loop import State, run
    from mpitrain.job.record.files.marks import Marks, starting

__all__ = ["Layout", "Marks", "State", "next_layout", "run", "starting"]

_MODULES = {
    "Layout": "mpitrain.job.elastic.layout",
    "Marks": "mpitrain.job.record.files.marks",
    "State": "mpitrain.job.elastic.loop",
    "next_layout": "mpitrain.job.elastic.layout",
    "run": "mpitrain.job.elastic.loop",
    "starting": "mpitrain.job.record.files.marks",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
