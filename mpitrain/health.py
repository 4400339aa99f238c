"""Faults that stop no rank by themselves: the public names of job/health."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpitrain.job.health import (
        Bad,
        DesyncError,
        FlippedBitError,
        GoodStates,
        Health,
        InitialState,
        Reports,
        StatesOnDisk,
    )

__all__ = ["Bad", "DesyncError", "FlippedBitError", "GoodStates", "Health", "InitialState", "Reports", "StatesOnDisk"]

__path__: list[str] = []  # a package for old paths of modules, which _moved.py leads to job/health


def __getattr__(name: str) -> Any:
    if name in __all__:  # loading torch takes seconds
        return getattr(import_module("mpitrain.job.health"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
