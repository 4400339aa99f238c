"""The data of a run: `corpus` finds, splits and reads the bytes, `order` selects the bytes of each sample. No torch.

For training loops of users: `batches` gives the batches of torch's datasets, and `TarSamples` is a dataset of samples in tar files.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mpitrain.job.data.corpus import Listing, Part, read_into, scan
from mpitrain.job.data.order import Batches, HeldoutBatches

if TYPE_CHECKING:
    from mpitrain.job.data.samples.batches import batches
    from mpitrain.job.data.samples.tar import TarSamples

__all__ = ["Batches", "HeldoutBatches", "Listing", "Part", "TarSamples", "batches", "read_into", "scan"]

_MODULES = {"TarSamples": "samples.tar", "batches": "samples.batches"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:  # loading torch takes seconds
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
