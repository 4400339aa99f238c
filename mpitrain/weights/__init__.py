"""A model's values in and out: checkpoints, full state dicts, safetensors files. No rank ever holds the whole model."""

from mpitrain.weights.whole.exporting import export_weights
from mpitrain.weights.whole.loading import Loaded, load_weights

__all__ = ["Loaded", "export_weights", "load_weights"]
