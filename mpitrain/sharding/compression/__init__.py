"""Compression of gradients between copies of a model: `compress_gradients` and its methods.

- `power_sgd.py` and `top_k.py` are the methods: what a matrix becomes in a message, and what the receivers make of it.
- `compression.py` has the order of a reduction: contributions, messages, residuals.
- `mpitrain/weights/kinds/compression.py` has its state in checkpoints.
"""

from mpitrain.sharding.compression.api import compress_gradients
from mpitrain.sharding.compression.power_sgd import power_sgd
from mpitrain.sharding.compression.top_k import top_k

__all__ = ["compress_gradients", "power_sgd", "top_k"]
