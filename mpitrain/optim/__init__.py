"""Optimizers for models whose parameters are spread over ranks, by whatever kind of parallelism.

AdamW, SGD, LAMB, LARS and Muon, and what runs between a backward and an optimizer's step: norms of gradients, checks of optimizers and
of torch's functions. The import of this package does not import torch; the use of an optimizer does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpitrain.optim.elementwise import SGD, AdamW
    from mpitrain.optim.lamb import LAMB
    from mpitrain.optim.lars import LARS
    from mpitrain.optim.muon import Muon

__all__ = ["LAMB", "LARS", "SGD", "AdamW", "Muon"]

_MODULES = {"LAMB": "lamb", "LARS": "lars", "SGD": "elementwise", "AdamW": "elementwise", "Muon": "muon"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
