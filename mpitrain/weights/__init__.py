"""Pretrained weights: loads safetensors files into the shards of a model, and exports them. No rank ever holds the whole model."""

from mpitrain.weights.exporting import export_weights
from mpitrain.weights.loading import Loaded, load_weights

__all__ = ["Loaded", "export_weights", "load_weights"]
