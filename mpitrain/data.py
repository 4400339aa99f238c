"""The data of a run, and batches of torch's datasets for a loop of your own: the public names of job/data."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpitrain.job.data import Batches, HeldoutBatches, Listing, Part, TarSamples, batches, read_into, scan

__all__ = ["Batches", "HeldoutBatches", "Listing", "Part", "TarSamples", "batches", "read_into", "scan"]

__path__: list[str] = []  # a package for old paths of modules, which _moved.py leads to job/data


def __getattr__(name: str) -> Any:
    if name in __all__:  # loading torch takes seconds
        return getattr(import_module("mpitrain.job.data"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
