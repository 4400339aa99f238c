"""The data of a run: `corpus` finds, splits and reads the bytes, `order` selects the bytes of each sample. No torch."""

from mpitrain.data.corpus import Listing, Part, read_into, scan
from mpitrain.data.order import Batches, HeldoutBatches

__all__ = ["Batches", "HeldoutBatches", "Listing", "Part", "read_into", "scan"]
